"""How CUTLASS's tile schedulers order a problem's tiles, in the kernel's own orientation.

The arithmetic is that of `PersistentTileSchedulerSm90Params` and
`PersistentTileSchedulerSm90StreamKParams` in CUTLASS's `tile_scheduler_params.h`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmsmith.core.launch import RasterOrder
from gemmsmith.core.tiles import TileGrid

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Column = NDArray[float64]

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


def triangle_tiles(extent: float, rows: Column, columns: Column) -> Column:
    """How many tiles of rows × columns meet the lower triangle of a square matrix (`triangle.hpp`).

    NumPy is loaded when this is called.
    """
    import numpy

    numbers = numpy.arange(int(-(-extent // rows.min())))[:, None]
    ends = numpy.minimum((numbers + 1) * rows, extent)
    widths = numpy.where(numbers * rows < extent, -(-ends // columns), 0.0)
    tiles: Column = widths.sum(axis=0)
    return tiles
