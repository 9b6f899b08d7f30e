"""How a kernel can sensibly be launched on a problem: run-time choices without duplicates.

Two launches that CUTLASS's schedulers turn into the same thing are one: the heuristic raster order
and decomposition are replaced by what they come to, a swizzle the grid is too small for by the one
that takes effect.
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
"""Equal slices must divide K, and models' widths often have a factor of 7."""
CLUSTER_SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Sizes of a cluster along K: hardware allows 16 thread blocks."""

MIN_K_TILES_PER_SPLIT = 4
"""Fewer cannot even fill the pipeline: the split would cost more than it saves."""
MIN_K_TILES_PER_CLUSTER_SPLIT = 2
MAX_SPLIT_WAVES = 2
"""Tiles times splits beyond this many waves only add reduction traffic."""


def launches(kernel: CutlassKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
    """The launches worth measuring, in a fixed order.

    Empty for a stream-K kernel where nothing is worth splitting: it would run as its persistent
    sibling does, only with a costlier scheduler.
    """
    if problem.operation.is_grouped:
        # Swizzled, every group's tiles would be rounded up to whole swizzle groups.
        return [Launch(raster=order) for order in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)]
    if kernel.backend is Backend.CUTLASS2X or kernel.scheduler is TileScheduler.GRID:
        return [Launch()]
    if _is_beyond_splitting(kernel, problem, device):
        return []
    grid = tile_grid(kernel, problem)
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
    """Whether even unpadded tiles are too many to split: true of most kernels that split for most
    problems, and quickly told.
    """
    if kernel.scheduler not in (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K):
        return False
    tile_m, tile_n, _ = kernel.tile
    elements = problem.m * problem.n * problem.batch
    return elements > MAX_SPLIT_WAVES * device.sm_count * tile_m * tile_n


def _orders(grid: TileGrid, cluster: tuple[int, int]) -> list[Launch]:
    """Also where all tiles run at once: which SMs are neighbours decides what they share on the
    way to L2. 256×6144×4096 took 24.1 µs along M and 25.6 along N (NVIDIA H200, 2026-11-21).
    """
    if grid.tiles_m == cluster[0] or grid.tiles_n == cluster[1]:
        return [launch_of(heuristic_raster(grid))]  # one line of tiles has one order
    swizzles = dict.fromkeys(effective_swizzle(grid, largest) for largest in SWIZZLES)
    return [
        launch_of(raster, swizzle)
        for raster in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)
        for swizzle in swizzles
    ]


def _cluster_splits(grid: TileGrid, sm_count: int) -> list[Launch]:
    """A cluster's blocks share a tile; without splits it is a plain kernel of few tiles."""
    most = min(
        grid.k_tiles // MIN_K_TILES_PER_CLUSTER_SPLIT, MAX_SPLIT_WAVES * sm_count // grid.tiles
    )
    found = [splits for splits in CLUSTER_SPLITS if splits <= most]
    return [
        launch_of(RasterOrder.HEURISTIC, 1, Decomposition.SPLIT_K, splits)
        if splits > 1
        else Launch()
        for splits in found
    ]


def _splitting(grid: TileGrid, resident: int) -> list[Launch]:
    found = _split_k(grid, resident, SPLITS)
    if grid.tiles % resident and grid.k_tiles > MIN_K_TILES_PER_STREAM_K_UNIT:
        found.append(launch_of(heuristic_raster(grid), 1, Decomposition.STREAM_K))
    return found


def _split_k(grid: TileGrid, resident: int, counts: Sequence[int]) -> list[Launch]:
    """`counts`, and what fills one wave and two, as far as the splits are worth measuring."""
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
    """Made once: a lookup that nothing was measured for asks for hundreds of these."""
    return Launch(raster=raster, swizzle=swizzle, decomposition=decomposition, splits=splits)


def _even_splits(grid: TileGrid, resident: int) -> list[int]:
    """The split counts that fill one wave and two: the first is what CUTLASS's heuristic picks."""
    return [
        waves * resident // grid.tiles
        for waves in (1, 2)
        if 2 <= waves * resident // grid.tiles <= SPLITS[-1]
    ]
