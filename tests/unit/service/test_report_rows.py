"""Rows, reasons and ceilings: figures recomputed by hand, and what is left out when unknown."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from gemmsmith.answers.answer import Conditions, Ratio, Statistics
from gemmsmith.core.config import Use
from gemmsmith.core.kernel import TileScheduler
from gemmsmith.core.launch import Decomposition, Launch
from gemmsmith.core.problem import DType, Layout, Problem
from service.report.problem_rows import ProblemClass, classes_of, device_report, row_of
from service.report.reasons import default_note, notes, why
from service.report.roofs import measured_roof
from tests.support.docs import ROOT
from tests.support.replacing import replace
from tests.support.serving import ENVIRONMENT, H200, winner
from tuner.exchange import read_winners
from tuner.explain.competitors import Bound
from tuner.measure.ceilings import (
    Ceilings,
    CeilingsError,
    Copy,
    Peak,
    copy_sets,
    path_for,
    read_ceilings,
    write_ceilings,
)
from tuner.trial import Winner

FILES = sorted((ROOT / "configs" / "winners").glob("*.jsonl"))
SHIPPED = [
    found for path in FILES if path.name.startswith(f"{H200.slug}.") for found in read_winners(path)
]
KINDS = ProblemClass
STATE = Conditions(sm_clock_mhz=1900.0, power_w=600.0, temperature_c=50.0)


def time(us: float) -> Statistics:
    return Statistics(median_us=us, ci_low_us=us, ci_high_us=us, samples=25)


def copy(read_bytes: int, us: float) -> Copy:
    return Copy(read_bytes=read_bytes, sets=1, statistics=time(us), conditions=STATE)


CEILINGS = Ceilings(
    device=H200,
    environment=ENVIRONMENT,
    measured_at="2026-11-21T00:00:00+00:00",
    copy=copy(4 * 10**9, 2000.0),  # 4 TB/s
    copies=(copy(4 * 10**6, 4.0), copy(16 * 10**6, 10.0)),  # 2 and 3.2 TB/s
    peaks=(
        Peak(
            problem=Problem(m=8192, n=8192, k=8192),
            statistics=time(2 * 8192**3 / 800e6),  # 800 TFLOP/s
            conditions=STATE,
        ),
    ),
)


def behind(
    problem: Problem, ratio: Ratio, launch: Launch | None = None, **kernel: object
) -> Winner:
    stored = winner(problem)
    assert stored.candidate
    candidate = replace(
        stored.candidate,
        kernel=replace(stored.candidate.kernel, swapped=False, **kernel),
        launch=launch or Launch(),
    )
    return replace(stored, candidate=candidate, speedup=ratio)


CLEAR = Ratio(median=0.9, ci_low=0.89, ci_high=0.91)


def reason(problem: Problem, launch: Launch | None = None, **kernel: object) -> str:
    """Why a problem stays with cuBLAS whose candidate is clearly slower."""
    return why(row_of(behind(problem, CLEAR, launch, **kernel), None))


def test_the_bandwidth_of_a_copy_of_the_same_size() -> None:
    assert CEILINGS.bandwidth == pytest.approx(4e12)
    assert CEILINGS.bandwidth_at(8 * 10**6) == pytest.approx(2e12)
    assert CEILINGS.bandwidth_at(20 * 10**6) == pytest.approx(20e6 / 7e-6)  # halfway in time
    assert CEILINGS.bandwidth_at(10**11) == pytest.approx(4e12)
    assert CEILINGS.bandwidth_at(8 * 10**6 - 1) is None


def test_only_types_without_a_peak_are_named() -> None:
    """Operations with an epilogue, a grouping or another result have the peak of their types."""
    report = device_report(SHIPPED, CEILINGS)
    lacking = {
        row.problem.operation.types
        for row in report.rows
        if row.cutlass and row.cutlass.peak_share is None
    }
    assert DType.BF16 not in lacking
    (sentence,) = (note for note in notes(report) if note.startswith("No peak"))
    names = sentence.removeprefix("No peak was measured for ").partition(":")[0]
    assert names.split(", ") == sorted(lacking)


def test_ceilings_travel_as_a_file(tmp_path: Path) -> None:
    path = path_for(H200.slug, tmp_path / "new")
    write_ceilings(CEILINGS, path)
    assert path.name == "nvidia-h200-132sm.json"
    assert read_ceilings(path) == CEILINGS
    assert '"flops_per_second": 8' in path.read_text()
    assert path_for("../../etc/x", tmp_path).parent == tmp_path
    for text in ("[]", "{}", "x", '{"format": "gemmsmith-ceilings", "version": 1}'):
        path.write_text(text)
        with pytest.raises(CeilingsError, match="not a ceilings file"):
            read_ceilings(path)
    path.write_text('{"format": "gemmsmith-ceilings", "version": 99}')
    with pytest.raises(CeilingsError, match="upgrade"):
        read_ceilings(path)


def test_copies_rotate_over_three_times_the_cache() -> None:
    for read_bytes in (4 * 10**6, 16 * 10**6, 256 * 10**6):
        sets = copy_sets(read_bytes, 60 * 2**20)
        assert sets == 1 or 2 * read_bytes * (sets - 1) < 3 * 60 * 2**20
        assert 2 * read_bytes * sets >= 3 * 60 * 2**20


def test_figures_of_a_row() -> None:
    problem = Problem(m=16, n=4096, k=4096)
    row = row_of(winner(problem, us=10.0), CEILINGS)
    flops, moved = 2 * 16 * 4096 * 4096, 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert row.cutlass
    assert row.cublas
    assert row.intensity == pytest.approx(flops / moved)
    assert row.ridge == pytest.approx(200.0)
    assert row.bound is Bound.MEMORY
    assert row.cutlass.flops_per_second == pytest.approx(flops / 10e-6)
    assert row.cutlass.peak_share == pytest.approx(flops / 10e-6 / 800e12)
    assert row.cutlass.bandwidth_share == pytest.approx(moved / 10e-6 / 4e12)
    copied_us = 10.0 + (moved - 32e6) / (8e9 - 32e6) * 1990.0
    assert row.cutlass.copy_share == pytest.approx(copied_us / 10.0)
    assert row.cublas.bandwidth_share == pytest.approx(moved / 11e-6 / 4e12)
    assert row_of(winner(Problem(m=4096, n=4096, k=4096)), CEILINGS).bound is Bound.COMPUTE


def test_without_ceilings_nothing_is_invented() -> None:
    report = device_report(SHIPPED, None)
    for row in report.rows:
        assert row.bound is row.ridge is None
        for side in (row.cutlass, row.cublas):
            assert side
            assert side.peak_share is side.bandwidth_share is side.copy_share is None
    assert "No ceilings were measured for nvidia-h200-132sm" in notes(report)[0]


@pytest.mark.parametrize("slug", sorted({path.name.partition(".")[0] for path in FILES}))
def test_no_shipped_winner_is_above_a_limit(slug: str) -> None:
    winners = [w for path in FILES if path.name.startswith(f"{slug}.") for w in read_winners(path)]
    path = path_for(slug)
    ceilings = read_ceilings(path) if path.is_file() else None
    for row in device_report(winners, ceilings).rows:
        for side in (row.cutlass, row.cublas):
            assert side
            for share in (side.peak_share, side.bandwidth_share, side.copy_share):
                assert share is None or share <= 1.05, row.problem
    roof = measured_roof(winners[0].device, "bf16")
    assert roof
    assert roof.measured


def test_experts_without_tokens_move_nothing() -> None:
    problem = Problem(m=16, n=1536, k=2048, batch=128, dtype="bf16.group_rows")
    row = row_of(winner(problem, us=30.0), CEILINGS)
    assert row.cutlass
    assert row.cutlass.bytes_per_second < problem.operand_bytes / 8 / 30e-6
    assert row.cutlass.bandwidth_share
    assert row.cutlass.bandwidth_share <= 1.0


def test_summaries_of_the_shipped_winners() -> None:
    report = device_report(SHIPPED, None)
    assert len(report.rows) == len(SHIPPED)
    for dtype in report.dtypes:
        of_dtype = [w for w in SHIPPED if w.problem.dtype == dtype and w.speedup]
        best = [w.speedup.median for w in of_dtype]
        ratios = [
            1.0 if w.use is Use.CUBLAS else ratio for w, ratio in zip(of_dtype, best, strict=True)
        ]
        whole = next(s for s in report.summaries if s.dtype == dtype and s.group is None)
        assert whole.problems == len(ratios)
        assert whole.geometric_mean == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
        assert whole.median == statistics.median(ratios)
        assert whole.minimum == min(ratios)
        # Where an order of sums is demanded, torch's default cannot take the winner's place.
        assert whole.minimum >= 1.0 or of_dtype[0].problem.operation.summation is not None
        assert whole.below == sum(ratio < 0.97 for ratio in best)
        small = [s for s in report.summaries if (s.dtype, s.group) == (dtype, KINDS.TOKENS_64)]
        few = sum(w.problem.m <= 64 for w in SHIPPED if w.problem.dtype == dtype)
        assert [s.problems for s in small] == [few] * bool(few)


@pytest.mark.parametrize(
    ("problem", "kinds"),
    [
        (Problem(m=64, n=8192, k=1024), {KINDS.TOKENS_64}),
        (Problem(m=65, n=8192, k=1024), {KINDS.TOKENS_256}),
        (Problem(m=513, n=8192, k=1024), set()),
        (Problem(m=128, n=128, k=16384), {KINDS.TOKENS_256, KINDS.AWKWARD}),
        (Problem(m=896, n=4864, k=4096), {KINDS.AWKWARD}),  # 133 tiles on 132 SMs
        (Problem(m=65536, n=128, k=512), {KINDS.LARGE, KINDS.AWKWARD}),
        (Problem(m=1024, n=50257, k=768), {KINDS.LARGE, KINDS.UNALIGNED}),
        (Problem(m=4096, n=4096, k=1024, layout=Layout.NT), {KINDS.LARGE, KINDS.LAYOUT_NT}),
        (Problem(m=4096, n=4096, k=1024, batch=2), {KINDS.LARGE, KINDS.BATCHED}),
    ],
)
def test_classes(problem: Problem, kinds: set[ProblemClass]) -> None:
    assert set(classes_of(problem, 132)) == kinds


def test_a_reason_for_all_that_is_below_one_or_costs_more_than_it_gains() -> None:
    priced = 0
    for row in device_report(SHIPPED, None).rows:
        assert row.ratio
        kept = row.winner.use is Use.CUBLAS and row.winner.speedup.ci_low > 1.0
        assert bool(why(row)) == (row.ratio < 1.0 or kept)
        price = row.winner.power_penalty
        dear = kept and (price is None or price > row.winner.speedup.ci_low)
        assert ("higher power draw" in why(row)) == dear
        assert ("every regime" in why(row)) == (kept and not dear)
        assert "\n" not in why(row)
        priced += kept
    assert priced


def test_a_tie_is_called_one() -> None:
    tie = Ratio(median=0.99, ci_low=0.98, ci_high=1.01)
    assert why(row_of(behind(Problem(m=64, n=4096, k=4096), tie), None)).startswith(
        "a tie: 0.980–1.010; "
    )


def test_waves() -> None:
    problem = Problem(m=896, n=2048, k=4096)
    kernel = {"tile": (128, 128, 64), "cluster": (1, 1), "stages": 0}
    persistent = kernel | {"scheduler": TileScheduler.PERSISTENT}
    assert "112 of 132 SMs busy in the only wave" in reason(problem, **persistent)
    longer = replace(problem, n=2560)  # 140 tiles
    assert "8 of 132 SMs busy in the last of 2 waves" in reason(longer, **persistent)
    assert "clusters of 4 fit on 120" in reason(longer, **persistent | {"cluster": (4, 1)})
    stream_k = kernel | {"scheduler": TileScheduler.STREAM_K}
    even = Launch(decomposition=Decomposition.STREAM_K)
    assert "SMs busy" not in reason(longer, even, **stream_k)


def test_splits() -> None:
    problem = Problem(m=128, n=128, k=16384)
    tile = {"tile": (128, 128, 64), "cluster": (1, 1)}
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=16)
    two = reason(problem, launch, **tile, scheduler=TileScheduler.SPLIT_K)
    assert "16 of 132 SMs busy in the only wave" in two
    assert "split 16 times along K, 1.0 MB of FP32 partials beside 8.4 MB of operands" in two
    within = reason(problem, launch, **tile, scheduler=TileScheduler.CLUSTER_SPLIT_K)
    assert "partials" not in within
    assert "16 of 132 SMs busy" in within


def test_roofs_and_rows_and_the_power_cap() -> None:
    small = Problem(m=16, n=4096, k=4096)
    assert "memory-bound: at 105% of the bandwidth of a copy" in why(
        row_of(behind(small, CLEAR), CEILINGS)
    )
    slower = behind(Problem(m=4096, n=4096, k=4096), CLEAR)
    capped = replace(slower.device, max_clock_mhz=1980)
    state = replace(STATE, sm_clock_mhz=1500.0, throttle=("sw_power_cap",))
    line = why(row_of(replace(slower, device=capped, conditions=state), CEILINGS))
    assert "of the measured peak, cuBLAS at" in line
    assert "power-capped at 1500 of 1980 MHz" in line
    odd = reason(Problem(m=64, n=4096, k=4095))
    assert "rows of A, B are not 16-byte aligned" in odd


def test_what_cublas_ran() -> None:
    slower = behind(Problem(m=256, n=4096, k=4096), CLEAR)
    known = replace(slower, baseline_kernels=("nvjet_tst_128x64_64x8_2x1_v_bz_splitK_TNT",))
    said = why(row_of(known, None))
    assert "cuBLAS ran tiles of 64×128 in clusters of 1×2, split along K" in said
    strange = replace(slower, baseline_kernels=("a" * 200, "b"))
    assert f"cuBLAS ran {'a' * 60} + b" in why(row_of(strange, None))


def test_where_the_baseline_is_another_product() -> None:
    assert default_note(Problem(m=64, n=50257, k=768)) == ""
    fp8 = Problem(m=64, n=50257, k=768, dtype=DType.FP8_E4M3)
    assert "bf16 product" in default_note(fp8)
    assert "8 calls" in default_note(replace(fp8, n=4096, batch=8))


def test_a_problem_that_nothing_survived() -> None:
    lost = replace(winner(Problem(m=64, n=64, k=64)), candidate=None, statistics=None, speedup=None)
    report = device_report([lost], CEILINGS)
    assert report.summaries == ()
    assert why(report.rows[0]) == "no CUTLASS candidate survived verification"
    assert "1 of 1 problems have no paired ratio." in notes(report)


def test_other_software_is_said() -> None:
    other = replace(ENVIRONMENT, driver="999.1")
    report = device_report(
        [replace(winner(Problem(m=64, n=64, k=64)), environment=other)], CEILINGS
    )
    assert any("other software than the ceilings" in line for line in notes(report))
