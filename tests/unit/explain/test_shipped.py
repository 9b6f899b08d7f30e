"""Every shipped winner is explained, and the figures agree with ones computed here by hand."""

from __future__ import annotations

import random
import re
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest

from gemmsmith.core.kernel import CutlassKernel, TileScheduler
from gemmsmith.core.launch import Decomposition
from gemmsmith.core.operation import Epilogue, Scaling
from gemmsmith.core.problem import Problem
from tests.support.shipped import shipped_files
from tuner.exchange import read_winners
from tuner.explain import Explanation, explain
from tuner.explain.advice import WORTH, AdviceKind, alternatives
from tuner.explain.breakdown import TimePart
from tuner.explain.competitors import Bound
from tuner.explain.grid import Grid
from tuner.explain.padding import unaligned
from tuner.explain.roofline import regime_of, roofline_of
from tuner.trial import Winner
from tuner.workloads.spreads import Spread, ends_of

MOST_SHARE = 1.05
SEED = 42


@pytest.fixture(scope="module")
def explained() -> list[tuple[Winner, Explanation]]:
    """Every winner, explained beside those of its file whose problems it could be."""
    every = []
    for file in shipped_files():
        winners = {winner.problem: winner for winner in read_winners(file)}
        for winner in winners.values():
            others = alternatives(winner.problem)
            near = [winners[other] for other in others if other in winners]
            every.append((winner, explain(winner, None, near)))
    return every


def of(explained: list[tuple[Winner, Explanation]], text: str, device: str) -> Explanation:
    problem = Problem.parse(text)
    return next(
        e for w, e in explained if w.problem == problem and w.device.slug.startswith(device)
    )


def test_every_winner_has_a_reason_and_says_what_is_left(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    for winner, item in explained:
        assert winner.speedup is not None
        if winner.use.is_default:
            assert item.why.startswith("The default stays"), winner.problem
        else:
            assert f"{winner.speedup.median:.3f} times as fast" in item.why, winner.problem
        figures = re.findall(r"\d+\.\d+", item.why)
        assert len(figures) >= 3, (winner.problem, item.why)
        assert "on record" in item.left or "nominal" in item.left, winner.problem
        assert item.power.endswith("."), winner.problem
        for sentence in (item.why, item.left, item.power):
            assert "None" not in sentence, (winner.problem, sentence)
            assert "nan" not in sentence.split(), (winner.problem, sentence)


def test_a_cause_explains_the_difference_or_says_that_it_does_not(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    for winner, item in explained:
        assert item.candidate is not None
        assert item.default is not None
        admitted = ("do not explain", "does not count", "is too large", "takes as long")
        if any(words in item.why for words in admitted):
            continue
        ours, theirs = item.candidate.parts, item.default.parts
        gap = item.default.time_us - item.candidate.time_us
        rest = theirs[TimePart.REST] - ours[TimePart.REST]
        assert abs(gap - rest) >= 0.49 * abs(gap), (winner.problem, item.why)
        assert abs(gap - rest) <= 2.01 * abs(gap), (winner.problem, item.why)


def test_no_share_of_a_limit_is_above_one(explained: list[tuple[Winner, Explanation]]) -> None:
    for winner, item in explained:
        for side in (item.candidate, item.default):
            assert side is not None
            assert side.share is not None, winner.problem
            assert 0 < side.share <= MOST_SHARE, winner.problem


def test_parts_add_up_to_the_time_that_was_measured(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    for winner, item in explained:
        for side in (item.candidate, item.default):
            assert side is not None
            assert sum(side.parts.values()) == pytest.approx(side.time_us), winner.problem


def test_limits_are_those_of_the_regime_and_below_the_nominal_ones(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    for winner, item in explained:
        roofline = item.work.roofline
        assert roofline is not None
        assert roofline.peak.is_measured, winner.problem
        assert roofline.bandwidth.is_measured, winner.problem
        assert roofline.peak.rate < roofline.nominal_peak, winner.problem
        assert roofline.bandwidth.rate < roofline.nominal_bandwidth, winner.problem
        in_regime = [r for r in winner.regimes if r.regime is item.regime]
        assert winner.statistics is not None
        assert not winner.regimes or in_regime[0].median_us == winner.statistics.median_us


def runs(problem: Problem) -> list[int]:
    ends = ends_of(problem, Spread.BALANCED, 0)
    return [stop - start for start, stop in pairwise((0, *ends))]


def counted_tiles(problem: Problem, tile: tuple[int, ...], cluster: tuple[int, ...]) -> int:
    """Tiles, one by one: rows of clusters for each group."""
    dtype = problem.dtype
    heights = [problem.m] * problem.batch
    if "group_rows" in dtype:
        heights = runs(problem)
    total = 0
    for height in heights:
        rows = columns = 0
        while rows * tile[0] < height:
            rows += cluster[0]
        while columns * tile[1] < problem.n:
            columns += cluster[1]
        total += rows * columns
        if problem.operation.symmetric:  # without clusters that lie above the diagonal
            whole = (tile[0] * cluster[0], tile[1] * cluster[1])
            above = sum(
                row * whole[0] + whole[0] <= column * whole[1]
                for row in range(rows // cluster[0])
                for column in range(columns // cluster[1])
            )
            total -= above * cluster[0] * cluster[1]
    return total


def counted_bytes(problem: Problem) -> float:
    """Each operand once; of grouped products, the weights of groups with tokens."""
    operation = problem.operation
    sizes = {"bf16": 2, "fp16": 2, "tf32": 4, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
    element = sizes[operation.types.value]
    groups = float(problem.batch)
    if "group_rows" in problem.dtype:
        draws = [(spread, draw) for spread in Spread for draw in range(8)]
        counts = [len(set(ends_of(problem, *draw)) - {0}) for draw in draws]
        groups = sum(counts) / len(counts)
    rows_of_a = problem.m * (1 if operation.is_grouped else problem.batch)
    columns_of_b = problem.n * (1 if "group_depth" in problem.dtype else groups)
    matrices = rows_of_a if operation.symmetric else rows_of_a + columns_of_b
    moved = matrices * problem.k * element
    outputs = problem.batch if "group_rows" not in problem.dtype else 1
    stored = operation.epilogue.outputs + operation.epilogue.reads + operation.accumulate
    moved += problem.m * problem.columns * operation.d.bytes * outputs * stored
    if operation.scaling is Scaling.ROW:
        moved += 4 * (problem.m * outputs + problem.n * groups)
    return moved


def test_tiles_waves_and_bytes_of_fifty_winners_counted_again(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    """The sample has all devices and operations as often as the shipped winners."""
    known = [
        (winner, item)
        for winner, item in explained
        if winner.candidate is not None and isinstance(winner.candidate.kernel, CutlassKernel)
    ]
    for winner, item in random.Random(SEED).sample(known, 50):
        problem = winner.problem
        assert winner.candidate is not None
        kernel, launch = winner.candidate.kernel, winner.candidate.launch
        assert isinstance(kernel, CutlassKernel)
        tile, cluster = kernel.tile[:2], kernel.cluster
        if kernel.swapped:
            tile, cluster = tile[::-1], cluster[::-1]
        assert item.candidate is not None
        grid = item.candidate.grid
        assert grid is not None
        assert grid.tiles == counted_tiles(problem, tile, cluster), problem
        together = cluster[0] * cluster[1]
        if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
            together = launch.splits
        at_once = {1: 132, 2: 132, 3: 132, 4: 120, 8: 120}[together] * grid.blocks_per_sm
        spread_evenly = launch.decomposition in (Decomposition.STREAM_K, Decomposition.HEURISTIC)
        splits = 1 if spread_evenly else launch.splits
        waves = Fraction(grid.tiles * splits, at_once)
        assert grid.waves == pytest.approx(float(waves)), problem
        assert grid.rounds == ceil(waves), problem
        vectors = 8 * problem.n + 8 * problem.m  # a bias, and factors of rows and columns
        assert item.work.least_bytes == pytest.approx(counted_bytes(problem), abs=vectors), problem
        products = problem.m * problem.n * problem.k * counted_batch(problem)
        if problem.operation.symmetric:  # the diagonal and one side of it
            products = products * (problem.n + 1) / (2 * problem.n)
        assert item.work.intensity == pytest.approx(2 * products / item.work.least_bytes)


def counted_batch(problem: Problem) -> int:
    return 1 if problem.operation.is_grouped else problem.batch


def test_a_short_k_is_won_by_the_epilogue(explained: list[tuple[Winner, Explanation]]) -> None:
    item = of(explained, "4096x6144x1024", "nvidia-h200")
    assert item.candidate is not None
    assert item.default is not None
    ours, theirs = item.candidate.grid, item.default.grid
    assert ours is not None
    assert theirs is not None
    assert (ours.tile[:2], ours.tiles, round(ours.waves or 0, 2)) == ((128, 192), 1024, 7.76)
    assert (theirs.tile[:2], theirs.tiles, round(theirs.waves or 0, 2)) == ((128, 256), 768, 5.82)
    assert "1,024 tiles of 128×192 of the candidate are 7.76 waves" in item.why
    assert "768 tiles of 128×256 of the default are 5.82 waves" in item.why
    assert "The largest difference is the epilogue" in item.why
    assert item.work.bound is Bound.COMPUTE


def test_a_few_tokens_are_bound_by_memory(explained: list[tuple[Winner, Explanation]]) -> None:
    item = of(explained, "16x4096x14336", "nvidia-h200")
    assert item.work.bound is Bound.MEMORY
    assert "highest bandwidth on record" in item.left
    assert item.work.intensity == pytest.approx(15.9, abs=0.1)


def test_experts_without_tokens_are_not_counted(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    item = of(explained, "128x16x1536x2048 bf16.group_rows", "nvidia-h200")
    assert item.work.groups_read is not None
    assert item.work.groups_read <= 16
    whole = item.problem.operand_bytes
    assert item.work.least_bytes < whole / 8
    every = of(explained, "8x8192x7168x2048 bf16.group_rows", "nvidia-h200")
    assert every.work.groups_read is not None
    assert 6 < every.work.groups_read <= 8


def test_kernels_of_torch_and_of_cublas_name_their_tiles(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    grids: dict[str, Grid | None] = {
        text: (side := of(explained, text, "nvidia-h200").default) and side.grid
        for text in (
            "32x4096x7168x2048 bf16.group_rows",
            "8x8192x7168x2048 bf16.group_rows",
            "4093x4099x4091 bf16",
            "16x4096x14336 int8",
        )
    }
    tiles = {text: grid.tile for text, grid in grids.items() if grid}
    assert tiles == {
        "32x4096x7168x2048 bf16.group_rows": (64, 128, 128),
        "8x8192x7168x2048 bf16.group_rows": (128, 256, 64),
        "4093x4099x4091 bf16": (128, 128, 0),
        "16x4096x14336 int8": (64, 64, 128),
    }
    older = [text for text, grid in grids.items() if grid and grid.is_older]
    assert older == ["4093x4099x4091 bf16", "16x4096x14336 int8"]


def test_what_runs_beside_a_fused_product_is_counted(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    gated = of(explained, "4096x6144x1024 bf16.then_silu_gate", "nvidia-h200")
    assert gated.default is not None
    assert (gated.default.kernels.others, gated.default.kernels.passes) == (2, 5)
    plain = of(explained, "4096x6144x1024", "nvidia-h200")
    assert plain.default is not None
    assert plain.default.kernels.others == 0
    assert Epilogue.NONE is plain.problem.operation.epilogue


def test_advice_pays_and_is_above_the_roofline(
    explained: list[tuple[Winner, Explanation]],
) -> None:
    padded: set[Problem] = set()
    measured: set[AdviceKind] = set()
    for known, explanation in explained:
        for item in explanation.advice:
            assert item.ratio >= WORTH
            assert ("measured" in item.text) == item.is_measured, item.text
            assert ("predicted" in item.text) != item.is_measured, item.text
            assert str(item.problem) in item.text or not item.is_measured
            if item.is_measured:
                measured.add(item.kind)
                continue
            limits = roofline_of(item.problem, known.device, regime_of(known))
            assert limits is not None
            flops, moved = item.problem.flops, item.problem.operand_bytes
            if not item.problem.operation.is_grouped:  # whose empty groups are not read
                floor = max(flops / limits.peak.rate, moved / limits.bandwidth.rate) * 1e6
                assert item.us >= floor * 0.999
            if item.kind is AdviceKind.PADDING:
                padded.add(known.problem)
                assert unaligned(known.problem)
                assert not unaligned(item.problem), known.problem
    assert len(padded) >= 12
    assert AdviceKind.LAYOUT in measured
