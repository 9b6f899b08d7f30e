"""How CUTLASS's tile schedulers order a problem's tiles, in the kernel's own orientation.

The arithmetic is that of `PersistentTileSchedulerSm90Params` and
`PersistentTileSchedulerSm90StreamKParams` in CUTLASS's `tile_scheduler_params.h`.
"""

from __future__ import annotations

from gemmsmith.core.launch import RasterOrder
from gemmsmith.core.tiles import TileGrid

MIN_K_TILES_PER_STREAM_K_UNIT = 8
"""`min_iters_per_sk_unit_`: stream-K gives every block at least this many K tiles."""


def effective_swizzle(grid: TileGrid, largest: int) -> int:
    """The swizzle group that CUTLASS uses if it may use `largest` (`get_log_swizzle_size`)."""
    shorter = min(grid.tiles_m, grid.tiles_n)
    if largest >= 8 and shorter >= 6:
        return 8
    if largest >= 4 and shorter >= 3:
        return 4
    return 2 if largest >= 2 and shorter >= 2 else 1


def heuristic_raster(grid: TileGrid) -> RasterOrder:
    return RasterOrder.ALONG_M if grid.tiles_n > grid.tiles_m else RasterOrder.ALONG_N
