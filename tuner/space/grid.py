"""How a problem falls into tiles, clusters and waves, in the kernel's own orientation.

The arithmetic is that of `PersistentTileSchedulerSm90Params` and its stream-K sibling in
CUTLASS's `tile_scheduler_params.h`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gemmsmith.kernel import Backend, CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.launch import RasterOrder
from gemmsmith.problem import Problem

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

N = TypeVar("N", int, "NDArray[float64]")

_SMS_PER_GPC = 18
"""Streaming multiprocessors of a whole GPU processing cluster of GH100: a cluster stays inside."""
_RESIDENT = {
    132: {4: 120, 6: 102, 8: 120, 10: 70, 12: 84, 14: 98, 16: 112},
}
"""Blocks in clusters that run at once, by SM count and cluster size, as
`cudaOccupancyMaxActiveClusters` said on one NVIDIA H200 (2026-11-21). GPCs differ from one GPU to
the next, so it is an estimate there too; a launch asks its own device."""

MIN_K_TILES_PER_STREAM_K_UNIT = 8
"""`min_iters_per_sk_unit_`: stream-K gives no block less than this many K tiles."""


class TileGrid(NamedTuple):
    """Output tiles along the kernel's M and N (padded to whole clusters), and batches."""

    tiles_m: int
    tiles_n: int
    batch: int
    k_tiles: int

    @property
    def tiles(self) -> int:
        """All output tiles, those that only fill up a cluster included."""
        return self.tiles_m * self.tiles_n * self.batch


def extents(kernel: CutlassKernel, problem: Problem) -> tuple[int, int]:
    """(M, N) as the kernel sees them: swapped kernels run their M along the problem's N."""
    return (problem.n, problem.m) if kernel.swapped else (problem.m, problem.n)


def tile_grid(kernel: CutlassKernel, problem: Problem) -> TileGrid:
    """The tiles of a problem under a kernel."""
    m, n = extents(kernel, problem)
    tile_m, tile_n, tile_k = kernel.tile
    cluster_m, cluster_n = kernel.cluster
    return TileGrid(
        padded_tiles(m, tile_m, cluster_m),
        padded_tiles(n, tile_n, cluster_n),
        problem.batch,
        -(-problem.k // tile_k),
    )


def padded_tiles(extent: N, tile: N, cluster: N) -> N:
    """Tiles along one side, padded to whole clusters; of numbers or of columns of them."""
    return -(-extent // (tile * cluster)) * cluster


def effective_swizzle(grid: TileGrid, largest: int) -> int:
    """The swizzle group CUTLASS really uses when allowed `largest` (`get_log_swizzle_size`)."""
    shorter = min(grid.tiles_m, grid.tiles_n)
    if largest >= 8 and shorter >= 6:
        return 8
    if largest >= 4 and shorter >= 3:
        return 4
    return 2 if largest >= 2 and shorter >= 2 else 1


def heuristic_raster(grid: TileGrid) -> RasterOrder:
    """What CUTLASS's heuristic raster order comes to."""
    return RasterOrder.ALONG_M if grid.tiles_n > grid.tiles_m else RasterOrder.ALONG_N


@lru_cache(maxsize=1024)
def resident_blocks(sm_count: int, cluster_size: int) -> int:
    """Thread blocks that run at once, one per SM, clusters inside their GPC.

    What was measured, else CUTLASS's `get_max_cta_occupancy`, which takes all GPCs for whole ones.
    """
    if cluster_size == 1:
        return sm_count
    if measured := _RESIDENT.get(sm_count, {}).get(cluster_size):
        return measured
    whole, rest = divmod(sm_count, _SMS_PER_GPC)
    per_gpc = _SMS_PER_GPC - _SMS_PER_GPC % cluster_size
    return min(sm_count, whole * per_gpc + rest - rest % cluster_size)


def needs_grid_limits(kernel: CutlassKernel) -> bool:
    """Whether tiles and batches become grid dimensions (not for persistent kernels)."""
    return (
        kernel.backend is Backend.CUTLASS2X
        or kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
        or kernel.scheduler is TileScheduler.GRID
    )
