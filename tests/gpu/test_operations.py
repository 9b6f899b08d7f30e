"""A handful of CUTLASS kernels of each operation beside the plain float ones, as the measuring
child verifies them: outputs in FP32, added to; integers; factors per row; TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, Kernel, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.problem import Problem
from tests.gpu import selection
from tests.gpu.support.building import build
from tuner.backends import kernels
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice
from tuner.measure.policy import Policy

CHECKED = Policy(screen_samples=1, candidate_timeout_s=20.0)
FAMILIES = (
    ("bf16.out_f32", "nt"),
    ("fp16.out_f32", "tn"),
    ("int8", "tn"),
    ("int8.out_bf16", "tn"),
    ("int8.out_bf16.scale_row", "tn"),
    ("fp8_e4m3.scale_row", "tn"),
    ("fp8_e5m2.scale_row", "tn"),
    ("tf32", "tn"),
)
KINDS = {
    "pingpong": (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, False),
    "pingpong_swapped": (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, True),
    "cooperative": (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, False),
    "warp_specialized_swapped": (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID, True),
    "split_k": (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K, False),
    "cluster_split_k": (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K, False),
    "cluster_split_k_swapped": (
        MainloopSchedule.WARP_SPECIALIZED,
        TileScheduler.CLUSTER_SPLIT_K,
        True,
    ),
}
WITHOUT_BATCH = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)


def aligned(dtype: str, layout: str, batch: int = 1) -> Problem:
    """Rows of 16 bytes everywhere, but no extent a multiple of a tile."""
    return Problem(m=528, n=784, k=2080, batch=batch, dtype=dtype, layout=layout)


@cache
def chosen(dtype: str, layout: str) -> tuple[Kernel, ...]:
    """One kernel of each kind, and one that copies operands and stores any D, where there is."""
    found: list[Kernel] = []
    for mainloop, scheduler, swapped in KINDS.values():
        found += [
            kernel
            for kernel in map(cutlass, kernels(aligned(dtype, layout)))
            if (kernel.mainloop, kernel.scheduler, kernel.swapped) == (mainloop, scheduler, swapped)
        ][:1]
    if not dtype.endswith("scale_row"):
        odd = kernels(Problem(m=527, n=783, k=1031, dtype=dtype, layout=layout))
        found += [kernel for kernel in odd if selection.padded(kernel)][:1]
    return tuple(found)


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for family in FAMILIES for kernel in chosen(*family)]
    return build(wanted)[1]


def check(
    problem: Problem,
    chosen: Sequence[Kernel],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    """Every launch of these kernels is within the workload's tolerance."""
    contenders = [
        Contender(candidate=Candidate(kernel=kernel, launch=launch), pack=built[kernel.name])
        for kernel in chosen
        for launch in selection.launches_of(kernel, problem, model)
    ]
    assert contenders
    trials = list(device.screen(problem, contenders, CHECKED))
    assert len(trials) == len(contenders)
    wrong = [f"{t.candidate.key}: {t.failure.message}" for t in trials if t.failure is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("extents", [(528, 784, 2080), (16, 784, 2080), (1, 8, 16)], ids=str)
@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_every_kind_is_right(
    dtype: str,
    layout: str,
    extents: tuple[int, int, int],
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    m, n, k = extents
    if layout == "nt":  # rows of A run along M
        m = -(-m // 8) * 8
    problem = Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
    some = [
        kernel
        for kernel in chosen(dtype, layout)
        if k > 1024 or cutlass(kernel).scheduler not in WITHOUT_BATCH
    ]
    check(problem, some, built, device, model)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_batches_have_factors_of_their_own(
    dtype: str, layout: str, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    some = [
        kernel for kernel in chosen(dtype, layout) if cutlass(kernel).scheduler not in WITHOUT_BATCH
    ]
    check(aligned(dtype, layout, batch=3), some, built, device, model)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES[:2])
def test_the_same_kernels_add_to_d(
    dtype: str, layout: str, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    problem = aligned(f"{dtype}.accumulate", layout)
    check(problem, chosen(dtype, layout), built, device, model)


@pytest.mark.parametrize("dtype", ["int8", "int8.out_bf16", "tf32"])
def test_any_rows_are_read_and_stored(
    dtype: str, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    some = [kernel for kernel in chosen(dtype, "tn") if selection.padded(kernel)]
    check(Problem(m=527, n=783, k=1031, dtype=dtype), some, built, device, model)


def test_factors_per_row_of_an_odd_output_leave_with_our_own_kernels(
    built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    dtype = "int8.out_bf16.scale_row"
    some = [kernel for kernel in chosen(dtype, "tn") if kernel.backend is Backend.CUTE]
    check(Problem(m=33, n=783, k=4096, dtype=dtype), some, built, device, model)
