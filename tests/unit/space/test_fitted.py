"""Kernels fitted to a problem: legal, distinct, and their tiles fill the waves meant for them."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import EpilogueSchedule, Kernel, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tiles import tile_grid
from tests.support.replacing import replace
from tests.support.types import FLOATS
from tuner.arch import SM90
from tuner.backends import candidates, kernels, refusal
from tuner.backends.cutlass.operation import is_padded
from tuner.backends.cutlass3x import fitted

LEAST_FILL = 0.8


def _fitted(problem: Problem, device: DeviceModel) -> list[Kernel]:
    return fitted.kernels(kernels(problem)[0], problem, device)


def _fill(kernel: Kernel, problem: Problem, device: DeviceModel) -> float:
    """Of the products that whole waves of full tiles compute, the share that is the problem's."""
    tile_m, tile_n, _ = kernel.tile
    resident = SM90.resident_blocks(device.sm_count, kernel.cluster[0] * kernel.cluster[1])
    waves = ceil(tile_grid(kernel, problem).tiles / resident)
    return problem.m * problem.n * problem.batch / (waves * resident * tile_m * tile_n)


def test_seven_thousand_columns_on_132_sms(h200: DeviceModel) -> None:
    """2 × 56 tiles of 128×128 leave 20 SMs idle; 2 × 64 of 128×112 are 12% less work each."""
    problem = Problem(m=256, n=7168, k=2048)
    tiles = {kernel.tile for kernel in _fitted(problem, h200) if not kernel.swapped}
    assert (128, 112, 64) in tiles
    curated = {k.tile for k in kernels(problem) if k.scheduler is TileScheduler.PERSISTENT}
    assert (128, 112, 64) not in curated


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    m=st.integers(1, 8192),
    n=st.integers(1, 8192),
    k=st.sampled_from([64, 512, 2048, 2049, 2050, 2052]),
    batch=st.integers(1, 4),
    sm_count=st.sampled_from([78, 114, 132]),
)
def test_fitted_kernels_are_legal_distinct_and_fill_their_waves(
    dtype: DType, m: int, n: int, k: int, batch: int, sm_count: int
) -> None:
    device = DeviceModel(
        name="some GPU", arch="sm90", sm_count=sm_count, memory_bytes=1, l2_bytes=50 << 20
    )
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype)
    like = kernels(problem)[0]
    listed = fitted.kernels(like, problem, device)
    assert len({kernel.name for kernel in listed}) == len(listed)
    for kernel in listed:
        assert refusal(kernel, problem) is None
        assert _fill(kernel, problem, device) >= LEAST_FILL
        assert kernel.scheduler in (TileScheduler.PERSISTENT, TileScheduler.GRID)
        assert (kernel.epilogue, kernel.alignment_a) == (like.epilogue, like.alignment_a)
        assert (kernel.dtype, kernel.layout) == (problem.dtype, problem.layout)
        assert kernel.fast_accumulation is Operation.of(dtype).is_narrow_float


@pytest.mark.parametrize(
    ("m", "n"),
    [
        (1, 4096),  # a tile has 64 rows at least, on either side
        (16, 4096),
        (64, 64),  # one tile
        (256, 256),  # too few tiles for a wave, however narrow
        (65536, 65536),  # so many waves that the last does not matter
    ],
)
def test_none_where_nothing_fits(m: int, n: int, h200: DeviceModel) -> None:
    assert _fitted(Problem(m=m, n=n, k=4096), h200) == []


@pytest.mark.parametrize(
    ("n", "k", "padded", "epilogue"),
    [
        (7168, 2048, False, EpilogueSchedule.TMA),
        (7167, 2048, False, EpilogueSchedule.NO_SMEM),
        (7168, 2047, True, EpilogueSchedule.TMA),
        (7167, 2047, True, EpilogueSchedule.NO_SMEM),
    ],
)
def test_they_join_the_candidates_in_the_family_that_the_problem_takes(
    n: int, k: int, padded: bool, epilogue: EpilogueSchedule, h200: DeviceModel
) -> None:
    problem = Problem(m=256, n=n, k=k)
    curated = {kernel.name for kernel in kernels(problem)}
    offered = {candidate.kernel.name: candidate.kernel for candidate in candidates(problem, h200)}
    joined = [kernel for name, kernel in offered.items() if name not in curated]
    assert {kernel.name for kernel in joined} == {
        kernel.name for kernel in _fitted(problem, h200)
    } - curated
    assert (128, 112, 64) in {kernel.tile for kernel in joined}
    assert {(is_padded(kernel), kernel.epilogue) for kernel in joined} == {(padded, epilogue)}


def test_another_gpu_is_fitted_differently(h200: DeviceModel) -> None:
    problem = Problem(m=256, n=7168, k=2048, layout=Layout.NN)
    here, there = (
        {kernel.name for kernel in _fitted(problem, device)}
        for device in (h200, replace(h200, sm_count=78))
    )
    assert here != there
