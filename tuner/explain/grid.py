"""How a kernel divides a problem: tiles, waves, and the share of the work that is padding.

Everything is along the problem's own M and N.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, RasterOrder
from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import padded_tiles, tile_grid, triangle_tiles
from tuner.arch import ARCHITECTURES, architecture
from tuner.backends import features
from tuner.backends.cutlass import footprint
from tuner.workloads.spreads import Spread, runs_of

MOST_BLOCKS = 4
"""Blocks that an SM is assumed to hold at most; registers allow no more of these kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A kernel's tiles on a problem and on a device. Shares are in 0 … 1.

    Attributes:
        tile: (M, N, K) of an output tile; K is 0 if it is not known.
        cluster: thread blocks per cluster along (M, N).
        stages: depth of the pipeline; 0 if it is not known.
        tiles: output tiles, those that pad a cluster included. For groups, with equal groups.
        splits: thread blocks that share a tile along K; 0 if a split's number is not known.
        shares_evenly: stream-K: all blocks get the same share of the last wave's work.
        blocks_per_sm: blocks that an SM runs at once.
        resident: blocks that run at once on the device.
        waves: blocks in all, divided by `resident`; None if they are not known.
        rounds: waves that are begun.
        busy_in_last: SMs that have work in the last wave.
        lost_m, lost_n, lost_k: share of the tiles' work beyond the problem's M, N and K.
        lost_waves: share of the SMs' time without a tile.
        raster: the extent along which consecutive blocks take tiles: `M`, `N`; "" if not known.
        swizzle: tiles per swizzled group; 0 if not known.
        l2_bytes: estimate of the bytes that all tiles read from L2, with multicast in clusters.
        overlaps: whether a tile's epilogue runs beside the next tile's products.
        is_older: a kernel for an older architecture, without TMA and wgmma.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    tiles: int
    splits: int
    shares_evenly: bool
    blocks_per_sm: int
    resident: int
    waves: float | None
    rounds: int
    busy_in_last: int
    lost_m: float
    lost_n: float
    lost_k: float
    lost_waves: float
    raster: str
    swizzle: int
    l2_bytes: int
    overlaps: bool
    is_older: bool

    @property
    def whole(self) -> float:
        """The share of the tiles' work that is the problem's."""
        return (1 - self.lost_m) * (1 - self.lost_n) * (1 - self.lost_k)


@dataclass(frozen=True, kw_only=True)
class GridShape:
    """What decides a grid, along the problem's extents."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    splits: int = 1
    shares_evenly: bool = False
    blocks_per_sm: int = 1
    resident: int
    raster: str = ""
    swizzle: int = 0
    overlaps: bool = False
    is_older: bool = False


def of_candidate(candidate: Candidate, problem: Problem, device: DeviceModel) -> Grid | None:
    """The grid of one of our kernels; None for cuBLASLt's, whose algorithms name no tile."""
    kernel, launch = candidate.kernel, candidate.launch
    if not isinstance(kernel, CutlassKernel) or kernel.arch not in ARCHITECTURES:
        return None
    cut = launch.decomposition
    is_stream = kernel.scheduler is TileScheduler.STREAM_K
    shares_evenly = is_stream and cut in (Decomposition.STREAM_K, Decomposition.HEURISTIC)
    in_cluster = kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K
    cluster = launch.splits if in_cluster else kernel.cluster[0] * kernel.cluster[1]
    allowed = min(launch.sm_budget or device.sm_count, device.sm_count)
    return grid_of(
        GridShape(
            tile=(*_turned(kernel.output_tile, kernel.swapped), kernel.tile[2]),
            cluster=_turned(kernel.cluster, kernel.swapped),
            stages=footprint.stages(kernel),
            splits=1 if shares_evenly else launch.splits,
            shares_evenly=shares_evenly,
            blocks_per_sm=blocks_per_sm(kernel),
            resident=architecture(kernel.arch).resident_blocks(allowed, cluster),
            raster=_raster(candidate, problem),
            swizzle=launch.swizzle,
            overlaps=bool((described := features(kernel)) and described.overlapped),
            is_older=kernel.mainloop is MainloopSchedule.MULTISTAGE,
        ),
        problem,
        device,
    )


def blocks_per_sm(kernel: CutlassKernel) -> int:
    """Blocks of a kernel that an SM runs at once: a persistent kernel starts one."""
    one_each = kernel.mainloop in (MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE)
    if one_each and kernel.scheduler is not TileScheduler.GRID:
        return 1
    shared = max(1, footprint.shared_bytes(kernel))
    return max(1, min(MOST_BLOCKS, architecture(kernel.arch).shared_bytes // shared))


def tiles_of(
    problem: Problem, tile: tuple[int, int, int], cluster: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Output tiles, and the M, N and K that they cover: each summed over batches or groups.

    Groups are those of the balanced spread. Of a symmetric product, all that is beyond the diagonal
    is beyond N.
    """
    m, n, k = problem.m, problem.n, problem.k
    along_n = padded_tiles(n, tile[1], cluster[1])
    depth = tile[2] or 1
    if problem.operation.grouping is Grouping.ROWS:
        runs = runs_of(problem, Spread.BALANCED, 0)
        along_m = sum(padded_tiles(run, tile[0], cluster[0]) for run in runs)
        return along_m * along_n, along_m * tile[0], along_n * tile[1], -(-k // depth) * depth
    along_m = padded_tiles(m, tile[0], cluster[0])
    tiles = along_m * along_n * problem.batch
    covered_k = -(-k // depth) * depth
    if problem.operation.symmetric:
        half = triangle_tiles(m, tile[:2], cluster)
        # The tiles of D that has M rows of (M + 1) / 2 elements on average.
        covered_n = half * tile[0] * tile[1] * 2 * n // ((m + 1) * along_m * tile[0])
        return half * problem.batch, along_m * tile[0], covered_n, covered_k
    if problem.operation.grouping is Grouping.DEPTH:
        runs = runs_of(problem, Spread.BALANCED, 0)
        covered_k = sum(-(-run // depth) * depth for run in runs)
    return tiles, along_m * tile[0], along_n * tile[1], covered_k


def grid_of(shape: GridShape, problem: Problem, device: DeviceModel) -> Grid:
    tiles, covered_m, covered_n, covered_k = tiles_of(problem, shape.tile, shape.cluster)
    slots = shape.resident * shape.blocks_per_sm
    blocks = tiles * shape.splits
    waves = blocks / slots if blocks else None
    rounds = ceil(waves) if waves else 0
    last = blocks - (rounds - 1) * slots if rounds else 0
    even = shape.shares_evenly
    busy = min(device.sm_count, slots if even else last)
    lost = 1 - blocks / (rounds * device.sm_count * shape.blocks_per_sm) if rounds else 0.0
    return Grid(
        tile=shape.tile,
        cluster=shape.cluster,
        stages=shape.stages,
        tiles=tiles,
        splits=shape.splits,
        shares_evenly=even,
        blocks_per_sm=shape.blocks_per_sm,
        resident=shape.resident,
        waves=waves,
        rounds=rounds,
        busy_in_last=busy,
        lost_m=1 - problem.m / covered_m,
        lost_n=1 - problem.n / covered_n,
        lost_k=1 - problem.k / covered_k,
        lost_waves=1 - shape.resident / device.sm_count if even else lost,
        raster=shape.raster,
        swizzle=shape.swizzle,
        l2_bytes=_l2_bytes(problem, shape, tiles),
        overlaps=shape.overlaps,
        is_older=shape.is_older,
    )


def _l2_bytes(problem: Problem, shape: GridShape, tiles: int) -> int:
    """A cluster's blocks share their rows of A along N, and their columns of B along M."""
    operation, (tile_m, tile_n, _) = problem.operation, shape.tile
    a = tile_m * operation.a.bytes / shape.cluster[1]
    b = tile_n * operation.b.bytes / shape.cluster[0]
    depth = problem.k
    if operation.grouping is Grouping.DEPTH:
        depth = problem.k // problem.batch
    return round(tiles * depth * (a + b))


def _raster(candidate: Candidate, problem: Problem) -> str:
    kernel, raster = candidate.kernel, candidate.launch.raster
    if not isinstance(kernel, CutlassKernel):
        return ""
    if raster is RasterOrder.HEURISTIC:  # CUTLASS goes along the shorter side
        grid = tile_grid(kernel, problem)
        raster = RasterOrder.ALONG_M if grid.tiles_n > grid.tiles_m else RasterOrder.ALONG_N
    return "M" if (raster is RasterOrder.ALONG_M) != kernel.swapped else "N"


def _turned(extents: tuple[int, int], swapped: bool) -> tuple[int, int]:
    return (extents[1], extents[0]) if swapped else extents
