"""Advice: measured on a tuned neighbour, else predicted and named so; only where it pays."""

from __future__ import annotations

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import TileScheduler, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tests.support.replacing import replace
from tests.support.serving import winner
from tuner.backends import kernels
from tuner.explain import explain
from tuner.explain.advice import Advice, AdviceKind
from tuner.explain.padding import MOST, unaligned
from tuner.explain.roofline import regime_of, roofline_of
from tuner.search.predict import predict
from tuner.trial import Winner

HEAD = Problem(m=1024, n=50257, k=768)
PADDED = Problem(m=1024, n=50304, k=768)
PLAIN = Problem(m=4096, n=4096, k=4096)


def advice(
    known: Winner, *near: Winner, kind: AdviceKind, tried: tuple[str, ...] = ()
) -> Advice | None:
    items = [item for item in explain(known, None, near, tried).advice if item.kind is kind]
    assert len(items) <= 1
    return items[0] if items else None


def test_a_tuned_neighbour_is_measured_advice() -> None:
    item = advice(winner(HEAD, us=290.0), winner(PADDED, us=100.0), kind=AdviceKind.PADDING)
    assert item is not None
    assert item.is_measured
    assert item.problem == PADDED
    assert item.ratio == pytest.approx(2.9)
    assert item.text == (
        "Pad N from 50257 to 50304: measured, 1024×50304×768 bf16 tn takes 100.00 µs, 2.90 times "
        "as fast as now. Rows of D are not multiples of 16 bytes."
    )


@pytest.mark.parametrize(
    ("neighbour", "us"),
    [
        (Problem(m=1024, n=50200, k=768), 100.0),  # smaller
        (Problem(m=1024, n=60000, k=768), 100.0),  # much larger
        (Problem(m=1032, n=50257, k=768), 300.0),  # as little aligned
        (Problem(m=1024, n=50304, k=768, dtype="fp16"), 100.0),
        (Problem(m=1024, n=50304, k=768, batch=2), 100.0),
    ],
    ids=str,
)
def test_other_neighbours_are_no_padding(neighbour: Problem, us: float) -> None:
    item = advice(winner(HEAD, us=290.0), winner(neighbour, us=us), kind=AdviceKind.PADDING)
    assert item is not None
    assert not item.is_measured


def test_padding_that_was_measured_as_not_worth_it_is_not_predicted() -> None:
    near = winner(PADDED, us=289.0)
    assert advice(winner(HEAD, us=290.0), near, kind=AdviceKind.PADDING) is None


def test_without_a_neighbour_the_cost_model_is_named() -> None:
    item = advice(winner(HEAD, us=290.0), kind=AdviceKind.PADDING)
    assert item is not None
    assert not item.is_measured
    assert "predicted by the cost model" in item.text
    assert (item.problem.m, item.problem.k) == (HEAD.m, HEAD.k)
    assert HEAD.n < item.problem.n <= MOST * HEAD.n


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


@pytest.mark.parametrize(
    ("other", "kind", "words"),
    [
        (replace(PLAIN, layout="nn"), AdviceKind.LAYOUT, "Store A and B in layout nn: measured, "),
        (
            replace(PLAIN, dtype="fp8_e4m3"),
            AdviceKind.TYPE,
            "(fp8_e4m3 tn), without the casts: measured",
        ),
        (
            replace(PLAIN, dtype="fp8_e4m3.scale_row"),
            AdviceKind.TYPE,
            "(fp8_e4m3.scale_row tn), without the casts: measured, ",
        ),
        (replace(PLAIN, m=4608), AdviceKind.ROWS, "Change M from 4096 to 4608: measured, "),
    ],
    ids=str,
)
def test_a_faster_neighbour_of_another_kind_is_named(
    other: Problem, kind: AdviceKind, words: str
) -> None:
    known = winner(PLAIN, us=220.0)
    item = advice(known, winner(other, us=200.0), kind=kind)
    assert item is not None
    assert (item.is_measured, item.problem, item.us) == (True, other, pytest.approx(200.0))
    assert item.ratio == pytest.approx(1.1 * other.m / PLAIN.m)
    assert words in item.text
    assert str(other) in item.text
    if kind is AdviceKind.LAYOUT:
        assert advice(known, winner(other, us=219.0), kind=kind) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, layout="nn", n=4104),  # another size
        replace(PLAIN, dtype="fp8_e4m3", k=8192),
        replace(PLAIN, m=8192),  # far
        replace(PLAIN, m=4608, n=4608),
        replace(PLAIN, dtype="fp8_e5m2"),
        replace(PLAIN, dtype="bf16.then_bias"),
    ],
    ids=str,
)
def test_other_products_are_no_advice(other: Problem) -> None:
    items = explain(winner(PLAIN, us=220.0), None, [winner(other, us=10.0)]).advice
    assert not [item for item in items if item.is_measured]


def test_eight_bits_are_predicted_by_the_roofline() -> None:
    known = winner(PLAIN, us=220.0)
    item = advice(known, kind=AdviceKind.TYPE)
    assert item is not None
    assert not item.is_measured
    limits = roofline_of(item.problem, known.device, regime_of(known))
    assert limits is not None
    assert item.us == max(limits.least_us(item.problem))
    assert "predicted by the roofline" in item.text
    assert "an upper bound" in item.text
    assert advice(winner(replace(PLAIN, dtype="fp8_e4m3"), us=220.0), kind=AdviceKind.TYPE) is None


def _with(problem: Problem, tile: tuple[int, int], us: float) -> Winner:
    """A winner whose kernel has this tile and no cluster."""
    kernel = next(
        kernel
        for kernel in map(cutlass, kernels(problem))
        if (kernel.tile[:2], kernel.cluster, kernel.swapped) == (tile, (1, 1), False)
        and kernel.scheduler is TileScheduler.PERSISTENT
    )
    return replace(winner(problem, us=us), candidate=Candidate(kernel=kernel, launch=Launch()))


def test_a_tile_of_the_twin_s_winner_is_measured() -> None:
    slow, twin = _with(PLAIN, (64, 64), 220.0), replace(PLAIN, dtype="fp16")
    item = advice(slow, _with(twin, (128, 128), 200.0), kind=AdviceKind.TILE)
    assert item is not None
    assert item.is_measured
    assert item.text.startswith("Use tiles of 128×128 instead of 64×64 (")
    assert "measured, 4096×4096×4096 fp16 tn takes 200.00 µs" in item.text
    item = advice(slow, _with(twin, (64, 64), 200.0), kind=AdviceKind.TILE)
    assert item is None or not item.is_measured


def test_a_tile_that_fills_the_waves_is_predicted_if_it_was_not_tried() -> None:
    problem = Problem(m=64, n=1600, k=6400)
    slow, best = _with(problem, (64, 64), 38.0), predict(problem, winner(problem).device)
    assert best is not None
    item = advice(slow, kind=AdviceKind.TILE)
    assert item is not None
    assert (item.is_measured, item.problem) == (False, problem)
    assert "predicted by the cost model" in item.text
    assert advice(slow, kind=AdviceKind.TILE, tried=(best.candidate.kernel.name,)) is None


def test_rows_beyond_a_wave_s_edge_are_predicted() -> None:
    full = Problem(m=128 * 66, n=512, k=4096)  # 264 tiles of 128×128 are two waves
    edge = replace(full, m=full.m + 128)
    item = advice(_with(edge, (128, 128), 73.0), kind=AdviceKind.ROWS)
    assert item is not None
    assert (item.is_measured, item.problem) == (False, full)
    assert item.text.startswith("Change M from 8576 to 8448 (2.00 waves instead of 2.03 waves): ")
    assert item.ratio == pytest.approx(73.0 / item.us * full.m / edge.m)
    assert advice(_with(full, (128, 128), 50.0), kind=AdviceKind.ROWS) is None
    many = Problem(m=512, n=512, k=8192, batch=9)
    item = advice(_with(many, (128, 128), 73.0), kind=AdviceKind.ROWS)
    assert item is not None
    assert item.problem == replace(many, batch=8)
    assert item.text.startswith("Change batch from 9 to 8 (0.97 waves instead of 1.09 waves): ")


@pytest.mark.parametrize(
    "problem",
    [
        Problem(m=8, n=4096, k=4096),  # memory is the limit
        Problem(m=4096, n=4096, k=8448, layout="nt"),  # tokens are K
        Problem(m=8448, n=512, k=4096, batch=8, dtype="bf16.group_rows"),
    ],
    ids=str,
)
def test_other_products_get_no_advice_on_rows(problem: Problem) -> None:
    near = [winner(replace(problem, m=problem.m + 8), us=1.0)]
    assert advice(winner(problem, us=900.0), *near, kind=AdviceKind.ROWS) is None


def test_without_the_default_s_time_there_is_no_advice() -> None:
    known = replace(winner(HEAD, us=290.0), baseline=None)
    assert explain(known, None, [winner(PADDED, us=1.0)]).advice == ()
    kept = winner(HEAD, us=290.0, use=Use.CUBLAS)
    item = advice(kept, winner(PADDED, us=100.0), kind=AdviceKind.PADDING)
    assert item is not None
    assert kept.baseline is not None
    assert item.ratio == pytest.approx(kept.baseline.median_us / 100.0)
