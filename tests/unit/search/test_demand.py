"""What tuning is expected to save: arithmetic on winners made up, and on the shipped ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from tests.support.records import DEVICE, PROBLEM, winner
from tuner.exchange import read_winners
from tuner.search.demand import (
    OTHER_GAIN,
    TYPICAL_GAINS,
    estimate,
    roofline_us,
    saving_us,
    typical_gain,
)
from tuner.store import Store
from tuner.trial import Winner

WINNERS = Path(__file__).resolve().parents[3] / "configs" / "winners"


def near(problem: Problem, speedup: float, use: Use = Use.CUTLASS) -> Winner:
    """A winner that was measured at `problem`; cuBLAS took 12 µs there."""
    ratio = Ratio(median=speedup, ci_low=speedup, ci_high=speedup)
    return replace(winner(problem), speedup=ratio, use=use)


def test_without_neighbours_time_is_the_rooflines_and_the_gain_the_usual_one() -> None:
    assert saving_us(PROBLEM, DEVICE, []) == roofline_us(PROBLEM, DEVICE) * TYPICAL_GAINS["bf16"]
    # 3.8 µs of launch, prologue and epilogue; 137 GFLOP at 132 × 4096 × 1.38 GHz take 184 µs.
    assert roofline_us(Problem(m=4096, n=4096, k=4096), DEVICE) == pytest.approx(188.0, rel=0.01)
    # 134 MB at 0.85 × 4.8 TB/s take 33 µs.
    assert roofline_us(Problem(m=1, n=16384, k=4096), DEVICE) == pytest.approx(36.7, rel=0.01)


def test_eight_bit_operands_take_half_the_time() -> None:
    wide = Problem(m=8192, n=8192, k=8192)
    launch = 3.8
    half = (roofline_us(wide, DEVICE) - launch) / 2
    narrow = replace(wide, dtype=DType.FP8_E4M3)
    assert roofline_us(narrow, DEVICE) - launch == pytest.approx(half)


def test_a_device_not_known_is_taken_for_an_h200() -> None:
    large = Problem(m=8192, n=8192, k=8192)
    assert saving_us(large, None, []) == saving_us(large, DEVICE, [])


def test_a_tuned_problem_promises_nothing() -> None:
    for use in Use:
        tuned = [near(PROBLEM, 1.5, use), near(replace(PROBLEM, m=512), 2.0)]
        assert saving_us(PROBLEM, DEVICE, tuned) == 0.0


def test_neighbours_give_the_mean_gain_and_the_nearest_the_time() -> None:
    near_one, far_one = replace(PROBLEM, m=512), replace(PROBLEM, m=1024)
    found = [
        near(near_one, 1.25),  # 0.2 of cuBLAS's time
        near(far_one, 2.0),  # 0.5
        near(replace(PROBLEM, n=1024), 3.0, Use.CUBLAS),  # 0: its callers run cuBLAS
    ]
    time = 12.0 * roofline_us(PROBLEM, DEVICE) / roofline_us(near_one, DEVICE)
    assert saving_us(PROBLEM, DEVICE, found) == pytest.approx(time * 0.7 / 3)


def test_where_all_neighbours_keep_cublas_nothing_is_expected() -> None:
    neighbour = near(replace(PROBLEM, m=512), 0.96, Use.CUBLAS)
    assert saving_us(PROBLEM, DEVICE, [neighbour]) == 0.0


def test_winners_too_far_away_say_nothing() -> None:
    far = near(replace(PROBLEM, m=256 * 5), 9.0)
    assert saving_us(PROBLEM, DEVICE, [far]) == saving_us(PROBLEM, DEVICE, [])


def test_a_neighbor_without_a_comparison_gives_neither_time_nor_gain() -> None:
    lonely = replace(near(replace(PROBLEM, m=512), 2.0), baseline=None, speedup=None)
    assert saving_us(PROBLEM, DEVICE, [lonely]) == 0.0
    beside = near(replace(PROBLEM, m=1024), 2.0)
    time = 12.0 * roofline_us(PROBLEM, DEVICE) / roofline_us(beside.problem, DEVICE)
    assert saving_us(PROBLEM, DEVICE, [lonely, beside]) == pytest.approx(time * 0.25)


def test_the_store_gives_the_neighbours(store: Store) -> None:
    assert estimate(store, PROBLEM, DEVICE) == saving_us(PROBLEM, DEVICE, [])
    other = near(replace(PROBLEM, m=512), 1.25)
    store.promote(other)
    assert estimate(store, PROBLEM, DEVICE) == saving_us(PROBLEM, DEVICE, [other])
    fp16 = replace(PROBLEM, dtype=DType.FP16)
    assert estimate(store, fp16, DEVICE) == saving_us(fp16, DEVICE, [])
    store.promote(near(PROBLEM, 1.25))
    assert estimate(store, PROBLEM, DEVICE) == 0.0
    assert estimate(store, PROBLEM, None) == saving_us(PROBLEM, None, [])


def test_the_constants_are_what_the_shipped_winners_say() -> None:
    shipped = [found for file in sorted(WINNERS.glob("*.jsonl")) for found in read_winners(file)]
    gains: dict[float, list[float]] = {}
    for found in shipped:
        gain = 1 - 1 / found.speedup.median if found.speedup and not found.use.is_default else 0.0
        gains.setdefault(typical_gain(found.problem.operation), []).append(gain)
    assert gains.keys() == set(TYPICAL_GAINS.values())
    for typical, found_gains in gains.items():
        assert fmean(found_gains) == pytest.approx(typical, abs=0.001)
    assert fmean(itertools.chain(*gains.values())) == pytest.approx(OTHER_GAIN, abs=0.001)
    ratios = [
        found.baseline.median_us / roofline_us(found.problem, found.device)
        for found in shipped
        if found.baseline
    ]
    assert median(ratios) == pytest.approx(1.0, abs=0.25)
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) > 0.9 * len(ratios)
