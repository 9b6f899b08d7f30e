"""The launches of a kernel that are worth measuring on a problem, without duplicates.

Launches that CUTLASS's schedulers run alike are listed once. The heuristic raster order and
decomposition are replaced by those that the heuristics choose, and a swizzle that is too large for
the grid by the swizzle that takes effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, CutlassKernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import TileGrid, tile_grid
from tuner.arch import architecture
from tuner.backends.cutlass.grid import (
    MIN_K_TILES_PER_STREAM_K_UNIT,
    effective_swizzle,
    heuristic_raster,
)

SWIZZLES = (1, 2, 4, 8)
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
SLICES = (*SPLITS, 7)
"""Slices are equal, so their number must divide K; models' widths often have a factor of 7."""
CLUSTER_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Thread blocks of a cluster along K; the hardware allows 16."""

MIN_K_TILES_PER_SPLIT = 4
"""Fewer K tiles do not fill the pipeline, and the split costs more than it saves."""
MIN_K_TILES_PER_CLUSTER_SPLIT = 2
MAX_SPLIT_WAVES = 2
"""Waves of tiles times splits: more only add traffic for the reduction."""


def launches(kernel: CutlassKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
    """The launches worth measuring, in a fixed order.

    Empty for a stream-K kernel if no split is worth measuring: it would run like the persistent
    kernel of the same tile, with a costlier scheduler.
    """
    if problem.operation.is_grouped:
        # A swizzle would round every group's tiles up to whole swizzle groups.
        return [Launch(raster=order) for order in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)]
    if kernel.backend is Backend.CUTLASS2X or kernel.scheduler is TileScheduler.GRID:
        return [Launch()]
    if _is_beyond_splitting(kernel, problem, device):
        return []
    grid = tile_grid(kernel, problem)
    if problem.operation.symmetric:  # along N in bands of clusters' rows (`triangle.hpp`)
        bands = [band for band in SWIZZLES if band <= grid.tiles_m // kernel.cluster[0]]
        return [launch_of(RasterOrder.ALONG_N, band) for band in bands]
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        return _cluster_splits(grid, device.sm_count)
    blocks = kernel.cluster[0] * kernel.cluster[1]
    resident = architecture(device.arch).resident_blocks(device.sm_count, blocks)
    if kernel.scheduler is TileScheduler.STREAM_K:
        return _splitting(grid, resident)
    if kernel.scheduler is TileScheduler.SPLIT_K:
        return [
            launch
            for launch in _split_k(grid, resident, SLICES)
            if launch_refusal(kernel, launch, problem) is None
        ]
    return _orders(grid, kernel.cluster)


def _is_beyond_splitting(kernel: CutlassKernel, problem: Problem, device: DeviceModel) -> bool:
    # A quick test before the exact arithmetic: true of most problems.
    if kernel.scheduler not in (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K):
        return False
    tile_m, tile_n, _ = kernel.tile
    elements = problem.m * problem.n * problem.batch
    return elements > MAX_SPLIT_WAVES * device.sm_count * tile_m * tile_n


def _orders(grid: TileGrid, cluster: tuple[int, int]) -> list[Launch]:
    # The order matters even if all tiles run at once, because SMs that are neighbours share reads
    # from L2: 256×6144×4096 took 24.1 µs along M and 25.6 along N (NVIDIA H200, 2026-11-21).
    if grid.tiles_m == cluster[0] or grid.tiles_n == cluster[1]:
        return [launch_of(heuristic_raster(grid))]  # one line of tiles has one order
    swizzles = dict.fromkeys(effective_swizzle(grid, largest) for largest in SWIZZLES)
    return [
        launch_of(raster, swizzle)
        for raster in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)
        for swizzle in swizzles
    ]


def _cluster_splits(grid: TileGrid, sm_count: int) -> list[Launch]:
    """Launches whose clusters share a tile; with one split, a plain kernel for few tiles."""
    most = min(
        grid.k_tiles // MIN_K_TILES_PER_CLUSTER_SPLIT, MAX_SPLIT_WAVES * sm_count // grid.tiles
    )
    return [
        launch_of(RasterOrder.HEURISTIC, 1, Decomposition.SPLIT_K, splits)
        if splits > 1
        else Launch()
        for splits in CLUSTER_SPLITS
        if splits <= most
    ]


def _splitting(grid: TileGrid, resident: int) -> list[Launch]:
    splitting = _split_k(grid, resident, SPLITS)
    if grid.tiles % resident and grid.k_tiles > MIN_K_TILES_PER_STREAM_K_UNIT:
        splitting.append(launch_of(heuristic_raster(grid), 1, Decomposition.STREAM_K))
    return splitting


def _split_k(grid: TileGrid, resident: int, counts: Sequence[int]) -> list[Launch]:
    """Splits by `counts`, and by the counts that fill one and two waves, if worth measuring."""
    most = min(grid.k_tiles // MIN_K_TILES_PER_SPLIT, MAX_SPLIT_WAVES * resident // grid.tiles)
    if most < SPLITS[0]:
        return []
    raster = heuristic_raster(grid)
    return [
        launch_of(raster, 1, Decomposition.SPLIT_K, splits)
        for splits in sorted({*counts, *_even_splits(grid, resident)})
        if splits <= most
    ]


@lru_cache(maxsize=1024)
def launch_of(
    raster: RasterOrder,
    swizzle: int = 1,
    decomposition: Decomposition = Decomposition.DATA_PARALLEL,
    splits: int = 1,
) -> Launch:
    # Cached: a lookup of a problem that was never tuned needs hundreds of launches.
    return Launch(raster=raster, swizzle=swizzle, decomposition=decomposition, splits=splits)


def _even_splits(grid: TileGrid, resident: int) -> list[int]:
    """The split counts that fill one and two waves; CUTLASS's heuristic chooses the first."""
    return [
        waves * resident // grid.tiles
        for waves in (1, 2)
        if 2 <= waves * resident // grid.tiles <= SPLITS[-1]
    ]
