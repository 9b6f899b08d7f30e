"""Padding: measured on a tuned neighbour, else expected by the cost model; only where it pays."""

from __future__ import annotations

import pytest

from gemmsmith.core.problem import Problem
from tests.support.serving import winner
from tests.support.shipped import shipped_files
from tuner.exchange import read_winners
from tuner.explain import explain
from tuner.explain.advice import MOST, WORTH, padding, unaligned
from tuner.explain.roofline import regime_of, roofline_of

HEAD = Problem(m=1024, n=50257, k=768)
PADDED = Problem(m=1024, n=50304, k=768)


def test_a_tuned_neighbour_is_measured_advice() -> None:
    advice = padding(winner(HEAD, us=290.0), [winner(PADDED, us=100.0)])
    assert advice is not None
    assert advice.is_measured
    assert advice.padded == PADDED
    assert advice.ratio == pytest.approx(2.9)
    assert advice.text.startswith("Pad N from 50257 to 50304: it was measured at 100.00 µs, 2.90")
    assert advice.text.endswith("Rows of D are not multiples of 16 bytes.")


@pytest.mark.parametrize(
    ("neighbour", "us"),
    [
        (PADDED, 289.0),  # not worth it
        (Problem(m=1024, n=50200, k=768), 100.0),  # smaller
        (Problem(m=1024, n=60000, k=768), 100.0),  # much larger
        (Problem(m=1024, n=50304, k=768, dtype="fp16"), 100.0),
        (Problem(m=1024, n=50304, k=768, batch=2), 100.0),
    ],
    ids=str,
)
def test_other_neighbours_are_no_advice(neighbour: Problem, us: float) -> None:
    advice = padding(winner(HEAD, us=290.0), [winner(neighbour, us=us)])
    assert advice is None or not advice.is_measured


def test_without_a_neighbour_the_cost_model_is_named() -> None:
    advice = padding(winner(HEAD, us=290.0), [])
    assert advice is not None
    assert not advice.is_measured
    assert "the cost model expects" in advice.text
    assert (advice.padded.m, advice.padded.k) == (HEAD.m, HEAD.k)
    assert HEAD.n < advice.padded.n <= MOST * HEAD.n


@pytest.mark.parametrize(
    ("problem", "operands"),
    [
        (Problem(m=1024, n=50304, k=768), {}),
        (HEAD, {"D": "n"}),
        (Problem(m=50257, n=768, k=1024, layout="nt"), {"A": "m"}),
        (Problem(m=64, n=64, k=147, dtype="int8"), {"A": "k", "B": "k"}),
        (Problem(m=4093, n=4099, k=4091), {"A": "k", "B": "k", "D": "n"}),
    ],
    ids=str,
)
def test_rows_that_tma_cannot_load(problem: Problem, operands: dict[str, str]) -> None:
    assert unaligned(problem) == operands


def test_advice_on_the_shipped_winners_pays_and_is_above_the_roofline() -> None:
    advised = 0
    for file in shipped_files():
        for known in read_winners(file):
            advice = explain(known).advice
            if not unaligned(known.problem):
                assert advice is None, known.problem
                continue
            if advice is None:
                continue
            advised += 1
            assert advice.ratio >= WORTH
            assert not unaligned(advice.padded), known.problem
            limits = roofline_of(advice.padded, known.device, regime_of(known))
            assert limits is not None
            flops, moved = advice.padded.flops, advice.padded.operand_bytes
            floor = max(flops / limits.peak.rate, moved / limits.bandwidth.rate) * 1e6
            assert advice.us >= floor * 0.999
    assert advised >= 20
