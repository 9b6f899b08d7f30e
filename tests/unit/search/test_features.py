"""Features: numbers that say what the candidate is, and measurements put together."""

from __future__ import annotations

import math

import pytest

from gemmsmith.answer import Statistics
from gemmsmith.candidate import Candidate
from gemmsmith.kernel import TileScheduler
from gemmsmith.launch import Decomposition, Launch, RasterOrder
from gemmsmith.problem import DType, Layout, Problem
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H100, H200
from tests.support.serving import trial as stored_trial
from tuner.backends import candidates
from tuner.search.cost_model import AnalyticModel
from tuner.search.features import (
    FEATURES,
    FEATURES_VERSION,
    LEAST_CANDIDATES,
    Observation,
    features,
    gathered,
    observed_in_trials,
)
from tuner.trial import Failure, FailureKind, Phase, Trial

PROBLEM = Problem(m=256, n=4096, k=4096)
PROBLEMS = (
    PROBLEM,
    Problem(m=1, n=1, k=1),
    Problem(m=3, n=5, k=7, layout=Layout.NN),
    Problem(m=16, n=4096, k=32768, dtype=DType.FP8_E4M3),
    Problem(m=100, n=260, k=68, batch=3, layout=Layout.NT, dtype=DType.FP16),
)


def rows(problem: Problem, found: list[Candidate]) -> list[dict[str, float]]:
    analytic = AnalyticModel().predict(problem, found, H200)
    return [
        dict(zip(FEATURES, row, strict=True)) for row in features(problem, found, H200, analytic)
    ]


def row(problem: Problem, candidate: Candidate) -> dict[str, float]:
    return rows(problem, [candidate])[0]


def test_the_columns_of_this_version() -> None:
    """Models in the field know these: another order or meaning is another version."""
    assert FEATURES_VERSION == 1
    assert len(FEATURES) == len(set(FEATURES)) == 44
    assert FEATURES[:3] == ("log2_k", "batch", "element_bytes")
    assert FEATURES[-2:] == ("log2_analytic_us", "analytic_over_least_us")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_candidate_has_a_row_of_finite_numbers(problem: Problem) -> None:
    found = candidates(problem, H200)
    described = rows(problem, found)
    assert len(described) == len(found)
    assert all(math.isfinite(value) for each in described for value in each.values())
    assert all(0 < each["useful_share"] <= 1 for each in described)
    assert all(0 < each["last_wave_fill"] <= 1 for each in described)
    assert min(each["analytic_over_least_us"] for each in described) == 1.0


def test_candidates_differ_in_their_rows() -> None:
    """But for the order of neighbours within one wave, nothing that is chosen is lost."""
    found = candidates(PROBLEM, H200)
    described = {tuple(each.values()) for each in rows(PROBLEM, found)}
    assert len(described) == len(found)


def test_a_plain_kernel_by_hand() -> None:
    kernel = next(
        c.kernel
        for c in candidates(PROBLEM, H200)
        if c.kernel.tile == (128, 128, 64)
        and c.kernel.cluster == (1, 1)
        and c.kernel.scheduler is TileScheduler.PERSISTENT
        and not c.kernel.swapped
    )
    found = row(PROBLEM, Candidate(kernel=kernel, launch=Launch(raster=RasterOrder.ALONG_M)))
    assert (found["log2_m"], found["log2_n"], found["log2_k"]) == (8, 12, 12)
    assert (found["tile_m"], found["tile_n"], found["tile_k"]) == (128, 128, 64)
    assert found["tiles"] == 2 * 32
    assert found["waves"] == 1
    assert found["last_wave_fill"] == 64 / 132
    assert found["k_tiles_per_block"] == 64
    assert found["k_tile_bytes"] == 2 * 128 * 64 * 2
    assert found["flops_per_k_tile_byte"] == 64
    assert found["useful_share"] == 1
    assert found["raster_along_m"] == 1


def test_swapped_kernels_are_seen_in_their_own_orientation() -> None:
    swapped = next(c for c in candidates(PROBLEM, H200) if c.kernel.swapped)
    found = row(PROBLEM, swapped)
    assert (found["log2_m"], found["log2_n"]) == (12, 8)


@pytest.mark.parametrize(
    "scheduler", [TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K, TileScheduler.STREAM_K]
)
def test_splits_share_the_k_tiles(scheduler: TileScheduler) -> None:
    problem = Problem(m=128, n=128, k=16384)
    found = [
        c
        for c in candidates(problem, H200)
        if c.kernel.scheduler is scheduler and c.launch.decomposition is Decomposition.SPLIT_K
    ]
    assert found
    for candidate, each in zip(found, rows(problem, found), strict=True):
        if each["waves"] == 1:
            k_tiles = problem.k // candidate.kernel.tile[2]
            assert each["k_tiles_per_block"] == math.ceil(k_tiles / candidate.launch.splits)


def observation(candidate: Candidate, us: float) -> Observation:
    return Observation(
        problem=PROBLEM, device=H200, environment=ENVIRONMENT, candidate=candidate, us=us
    )


def test_gathered_keeps_the_first_time_of_a_candidate_in_a_fixed_order() -> None:
    found = candidates(PROBLEM, H200)[:LEAST_CANDIDATES]
    first = [observation(candidate, 10.0 + i) for i, candidate in enumerate(found)]
    again = [observation(candidate, 99.0) for candidate in found]
    (one,) = gathered([*first, *again])
    assert sorted(one.times_us) == [10.0 + i for i in range(len(found))]
    assert one.environments == (ENVIRONMENT,)
    assert gathered([*reversed(first), *again]) == [one]


def test_problems_with_few_candidates_are_left_out() -> None:
    found = candidates(PROBLEM, H200)[: LEAST_CANDIDATES - 1]
    assert gathered(observation(candidate, 1.0) for candidate in found) == []


def test_devices_and_problems_are_kept_apart() -> None:
    first = [observation(candidate, 10.0) for candidate in candidates(PROBLEM, H200)]
    other = replace(PROBLEM, dtype=DType.FP16)
    second = [replace(one, device=H100) for one in first]
    third = [replace(one, problem=other) for one in first]
    found = [(one.device.slug, one.problem) for one in gathered([*first, *second, *third])]
    assert found == [(H100.slug, PROBLEM), (H200.slug, PROBLEM), (H200.slug, other)]


def test_finals_count_before_screening_and_replayed_or_failed_trials_do_not() -> None:
    def trial(us: float, phase: Phase) -> Trial:
        time = Statistics(median_us=us, ci_low_us=us, ci_high_us=us, samples=5)
        return replace(stored_trial(PROBLEM), phase=phase, statistics=time)

    failed = Failure(kind=FailureKind.WRONG, message="wrong")
    trials = [
        trial(1.0, Phase.FINAL),
        trial(2.0, Phase.SCREEN),
        trial(3.0, Phase.FINAL),
        replace(trial(4.0, Phase.FINAL), replayed=True),
        replace(trial(5.0, Phase.FINAL), statistics=None, failure=failed),
        trial(6.0, Phase.SCREEN),
    ]
    assert [one.us for one in observed_in_trials(trials)] == [3.0, 1.0, 6.0, 2.0]
