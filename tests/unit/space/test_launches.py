"""Launches: those that differ, and only those."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import EpilogueSchedule, Kernel, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.legality import launch_refusal
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tiles import tile_grid
from tuner.arch import SM90
from tuner.backends import candidates, launches
from tuner.backends.cutlass.grid import effective_swizzle
from tuner.backends.cutlass.operation import kernel


def _kernel(
    scheduler: TileScheduler,
    tile: tuple[int, int, int] = (128, 128, 64),
    cluster: tuple[int, int] = (1, 1),
) -> Kernel:
    return kernel(
        operation=Operation.of(DType.BF16, Layout.TN),
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
    listed = launches(PERSISTENT, Problem(m=4096, n=8192, k=512), h200)
    assert {(launch.raster, launch.swizzle) for launch in listed} == {
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


def test_order_does_not_matter_within_one_row_but_within_one_wave(h200: DeviceModel) -> None:
    one_row = launches(PERSISTENT, Problem(m=64, n=1 << 20, k=512), h200)
    assert one_row == [Launch(raster=RasterOrder.ALONG_M)]
    one_wave = launches(PERSISTENT, Problem(m=1024, n=2048, k=512), h200)
    assert {launch.raster for launch in one_wave} == {RasterOrder.ALONG_M, RasterOrder.ALONG_N}


def test_stream_k_kernels_split_or_have_nothing_to_do(h200: DeviceModel) -> None:
    listed = launches(STREAM_K, Problem(m=512, n=512, k=8192), h200)
    splits = {launch.splits for launch in listed if launch.decomposition is Decomposition.SPLIT_K}
    assert {2, 4, 8, 16} <= splits
    assert max(splits) * 4 <= 8192 // 64  # at least 4 K tiles each
    assert [launch for launch in listed if launch.decomposition is Decomposition.STREAM_K]
    for launch in listed:
        assert launch.decomposition is not Decomposition.DATA_PARALLEL
        assert launch.splits == 1 or launch.decomposition is Decomposition.SPLIT_K
    assert launches(STREAM_K, Problem(m=512, n=512, k=64), h200) == []


def test_kernels_with_a_block_per_tile_have_one_launch(h200: DeviceModel) -> None:
    plain = kernel(
        operation=Operation.of(DType.BF16, Layout.TN),
        tile=(64, 64, 64),
        mainloop=MainloopSchedule.WARP_SPECIALIZED,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.GRID,
        alignment=8,
    )
    assert launches(plain, Problem(m=8192, n=8192, k=64), h200) == [Launch()]


def test_clusters_stay_inside_their_processing_cluster() -> None:
    """What an H200 said, where it was asked; else CUTLASS's arithmetic of whole GPCs."""
    measured = {1: 132, 2: 132, 4: 120, 6: 102, 8: 120, 10: 70, 12: 84, 14: 98, 16: 112}
    assert {size: SM90.resident_blocks(132, size) for size in measured} == measured
    assert [SM90.resident_blocks(78, size) for size in (1, 2, 4, 8, 16)] == [78, 78, 68, 64, 64]


@pytest.mark.parametrize("sm_count", [78, 114, 132])
def test_resident_blocks_are_whole_clusters(sm_count: int) -> None:
    for size in range(1, 17):
        blocks = SM90.resident_blocks(sm_count, size)
        assert blocks % size == 0
        assert size <= blocks <= sm_count


def test_swapped_kernels_run_their_m_along_n() -> None:
    swapped = kernel(
        operation=Operation.of(DType.BF16, Layout.TN),
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


SPLIT_K = [
    kernel(
        operation=Operation.of(dtype, layout),
        tile=(64, n, 128 // Operation.of(dtype).a.bytes),
        cluster=cluster,
        mainloop=mainloop,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.SPLIT_K,
        alignment=16 // Operation.of(dtype).a.bytes,
        fast_accumulation=Operation.of(dtype).is_narrow_float,
    )
    for dtype, layout in (
        *((DType.BF16, layout) for layout in Layout),
        (DType.FP8_E4M3, Layout.TN),
    )
    for mainloop, n, cluster in (
        (MainloopSchedule.PINGPONG, 64, (1, 1)),
        (MainloopSchedule.PINGPONG, 128, (2, 1)),
        (MainloopSchedule.WARP_SPECIALIZED, 32, (1, 1)),
    )
]
CLUSTER_SPLIT_K = [
    kernel(
        operation=Operation.of(dtype, Layout.TN),
        tile=(64, n, 256 // Operation.of(dtype).a.bytes),
        mainloop=MainloopSchedule.WARP_SPECIALIZED,
        epilogue=EpilogueSchedule.NO_SMEM,
        scheduler=TileScheduler.CLUSTER_SPLIT_K,
        alignment=16 // Operation.of(dtype).a.bytes,
        swapped=True,
        fast_accumulation=Operation.of(dtype).is_narrow_float,
    )
    for dtype in (DType.BF16, DType.FP8_E4M3)
    for n in (16, 64)
]
EXTENTS = st.one_of(st.sampled_from([16, 128, 256, 512, 4096]), st.integers(1, 2048))
SM_COUNTS = st.sampled_from([78, 114, 132])


def _device(sm_count: int) -> DeviceModel:
    return DeviceModel(
        name="some GPU", arch="sm90", sm_count=sm_count, memory_bytes=1, l2_bytes=50 << 20
    )


@settings(max_examples=200, deadline=None)
@given(
    splitting=st.sampled_from(SPLIT_K),
    m=EXTENTS,
    n=EXTENTS,
    k=st.one_of(st.sampled_from([4096, 7168, 8192, 14336]), st.integers(1, 4096)),
    sm_count=SM_COUNTS,
)
def test_slices_of_k_are_equal_and_start_on_16_bytes(
    splitting: Kernel, m: int, n: int, k: int, sm_count: int
) -> None:
    problem = Problem(m=m, n=n, k=k * 8, dtype=splitting.dtype, layout=splitting.layout)
    grid = tile_grid(splitting, problem)
    listed = launches(splitting, problem, _device(sm_count))
    assert len(set(listed)) == len(listed)
    for launch in listed:
        assert launch.decomposition is Decomposition.SPLIT_K
        assert launch.splits > 1
        assert problem.k % launch.splits == 0
        assert problem.k // launch.splits * problem.operation.a.bytes % 16 == 0
        assert grid.k_tiles // launch.splits >= 4
        assert grid.tiles * launch.splits <= 2 * sm_count


def test_slices_where_k_can_be_divided(h200: DeviceModel) -> None:
    splitting = SPLIT_K[0]
    many = {launch.splits for launch in launches(splitting, Problem(m=64, n=64, k=13440), h200)}
    assert {2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24} <= many
    assert launches(splitting, Problem(m=64, n=64, k=8 * 1021), h200) == []  # 1021 is prime
    assert launches(splitting, Problem(m=64, n=64, k=256), h200) == []
    assert launches(splitting, Problem(m=4096, n=4096, k=8192), h200) == []


@settings(max_examples=200, deadline=None)
@given(
    splitting=st.sampled_from(CLUSTER_SPLIT_K),
    m=EXTENTS,
    n=EXTENTS,
    k=st.integers(1, 2048),
    sm_count=SM_COUNTS,
)
def test_clusters_along_k_hold_up_to_16_blocks_with_work_for_each(
    splitting: Kernel, m: int, n: int, k: int, sm_count: int
) -> None:
    problem = Problem(m=m, n=n, k=k * 16, dtype=splitting.dtype)
    grid = tile_grid(splitting, problem)
    listed = launches(splitting, problem, _device(sm_count))
    assert len(set(listed)) == len(listed)
    for launch in listed:
        assert 1 <= launch.splits <= 16
        assert launch.splits <= grid.k_tiles
        split = launch.decomposition is Decomposition.SPLIT_K
        assert split or launch == Launch()
        assert split is (launch.splits > 1)


def test_clusters_along_k_come_in_every_useful_size(h200: DeviceModel) -> None:
    few_rows = launches(CLUSTER_SPLIT_K[0], Problem(m=16, n=512, k=8192), h200)
    assert [launch.splits for launch in few_rows] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert launches(CLUSTER_SPLIT_K[0], Problem(m=4096, n=4096, k=8192), h200) == []


@pytest.mark.parametrize(
    ("splitting", "k", "splits", "reason"),
    [
        (SPLIT_K[0], 4096, 16, None),
        (SPLIT_K[0], 4104, 16, "equal slices"),  # a launch of 4096, asked of a near problem
        (SPLIT_K[0], 4112, 2, None),
        (SPLIT_K[0], 4112, 4, "start on 16 bytes"),  # 1028 elements are 2056 bytes
        (SPLIT_K[0], 512, 16, "K tiles"),
        (CLUSTER_SPLIT_K[0], 4104, 16, None),
        (CLUSTER_SPLIT_K[0], 1024, 8, None),
        (CLUSTER_SPLIT_K[0], 1024, 10, "K tiles"),
        (STREAM_K, 4104, 16, None),
        (STREAM_K, 64, 2, "K tiles"),
    ],
)
def test_splits_of_one_k_need_not_be_legal_for_another(
    splitting: Kernel, k: int, splits: int, reason: str | None
) -> None:
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=splits)
    refused = launch_refusal(splitting, launch, Problem(m=64, n=64, k=k))
    assert refused is None if reason is None else reason in (refused or "")


@pytest.mark.parametrize("k", [64, 2080, 4096, 13440])
def test_no_candidate_s_splits_are_refused(k: int, h200: DeviceModel) -> None:
    problem = Problem(m=256, n=512, k=k)
    for candidate in candidates(problem, h200):
        assert launch_refusal(candidate.kernel, candidate.launch, problem) is None
