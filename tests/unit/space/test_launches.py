"""Launches: those that differ, and only those."""

from __future__ import annotations

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.launch import Decomposition, Launch, RasterOrder
from gemmsmith.problem import DType, Layout, Problem
from tuner.space import launches
from tuner.space.grid import effective_swizzle, resident_blocks, tile_grid
from tuner.space.operation import kernel


def _kernel(
    scheduler: TileScheduler,
    tile: tuple[int, int, int] = (128, 128, 64),
    cluster: tuple[int, int] = (1, 1),
) -> Kernel:
    return kernel(
        dtype=DType.BF16,
        layout=Layout.TN,
        tile=tile,
        cluster=cluster,
        mainloop=MainloopSchedule.COOPERATIVE,
        epilogue=EpilogueSchedule.TMA,
        scheduler=scheduler,
        alignment=8,
    )


PERSISTENT = _kernel(TileScheduler.PERSISTENT)
STREAM_K = _kernel(TileScheduler.STREAM_K)


def test_large_grid_takes_every_order(h200: DeviceModel) -> None:
    found = launches(PERSISTENT, Problem(m=4096, n=8192, k=512), h200)
    assert {(launch.raster, launch.swizzle) for launch in found} == {
        (raster, swizzle)
        for raster in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)
        for swizzle in (1, 2, 4, 8)
    }


def test_swizzle_needs_a_grid_wide_enough(h200: DeviceModel) -> None:
    """CUTLASS takes 8 only from 6 tiles on, 4 from 3, 2 from 2."""
    narrow = launches(PERSISTENT, Problem(m=65536, n=384, k=512), h200)
    assert {launch.swizzle for launch in narrow} == {1, 2, 4}
    grid = tile_grid(PERSISTENT, Problem(m=65536, n=256, k=512))
    assert [effective_swizzle(grid, largest) for largest in (1, 2, 4, 8)] == [1, 2, 2, 2]


def test_order_does_not_matter_within_one_wave_or_one_row(h200: DeviceModel) -> None:
    one_wave = launches(PERSISTENT, Problem(m=1024, n=2048, k=512), h200)
    one_row = launches(PERSISTENT, Problem(m=64, n=1 << 20, k=512), h200)
    assert one_wave == [Launch(raster=RasterOrder.ALONG_M)]
    assert one_row == [Launch(raster=RasterOrder.ALONG_M)]


def test_stream_k_kernels_split_or_have_nothing_to_do(h200: DeviceModel) -> None:
    found = launches(STREAM_K, Problem(m=512, n=512, k=8192), h200)
    splits = {launch.splits for launch in found if launch.decomposition is Decomposition.SPLIT_K}
    assert {2, 4, 8, 16} <= splits
    assert max(splits) * 4 <= 8192 // 64  # at least 4 K tiles each
    assert [launch for launch in found if launch.decomposition is Decomposition.STREAM_K]
    for launch in found:
        assert launch.decomposition is not Decomposition.DATA_PARALLEL
        assert launch.splits == 1 or launch.decomposition is Decomposition.SPLIT_K
    assert launches(STREAM_K, Problem(m=512, n=512, k=64), h200) == []


def test_kernels_with_a_block_per_tile_have_one_launch(h200: DeviceModel) -> None:
    plain = kernel(
        dtype=DType.BF16,
        layout=Layout.TN,
        tile=(64, 64, 64),
        mainloop=MainloopSchedule.WARP_SPECIALIZED,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.GRID,
        alignment=8,
    )
    assert launches(plain, Problem(m=8192, n=8192, k=64), h200) == [Launch()]


def test_clusters_stay_inside_their_processing_cluster() -> None:
    assert [resident_blocks(132, size) for size in (1, 2, 4, 8)] == [132, 132, 116, 112]


def test_swapped_kernels_run_their_m_along_n() -> None:
    swapped = kernel(
        dtype=DType.BF16,
        layout=Layout.TN,
        tile=(64, 16, 128),
        cluster=(2, 1),
        mainloop=MainloopSchedule.PINGPONG,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        alignment=8,
        swapped=True,
    )
    grid = tile_grid(swapped, Problem(m=16, n=4160, k=4096, batch=3))
    assert (grid.tiles_m, grid.tiles_n, grid.batch, grid.k_tiles) == (66, 1, 3, 32)
