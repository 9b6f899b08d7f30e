"""CUTLASS kernels of the operations beside the plain float ones: batches, addition to D, and rows
of any alignment. `test_kernels` has the sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Backend, cutlass
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.gpu import selection
from tests.gpu.support.families import PLAIN, WITHOUT_BATCH, check
from tuner.devices.cuda import CudaDevice


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return PLAIN.built()


@pytest.mark.parametrize("operation", PLAIN.operations, ids=lambda operation: operation.key)
def test_batches_have_factors_of_their_own(
    operation: Operation, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    some = [
        kernel
        for kernel in PLAIN.chosen(operation)
        if cutlass(kernel).scheduler not in WITHOUT_BATCH
    ]
    check(Problem.of(operation, 528, 784, 2080, 3), some, built, device, model)


@pytest.mark.parametrize(("dtype", "layout"), [("bf16.out_f32", "nt"), ("fp16.out_f32", "tn")])
def test_the_same_kernels_add_to_d(
    dtype: str, layout: str, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    problem = Problem(m=528, n=784, k=2080, dtype=f"{dtype}.accumulate", layout=layout)
    members = PLAIN.chosen(Operation.of(dtype, layout))
    check(problem, members, built, device, model)


@pytest.mark.parametrize("dtype", ["int8", "int8.out_bf16", "tf32"])
def test_any_rows_are_read_and_stored(
    dtype: str, built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    some = [kernel for kernel in PLAIN.chosen(Operation.of(dtype)) if selection.padded(kernel)]
    check(Problem(m=527, n=783, k=1031, dtype=dtype), some, built, device, model)


def test_factors_per_row_of_an_odd_output_leave_with_our_own_kernels(
    built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    dtype = "int8.out_bf16.scale_row"
    some = [
        kernel for kernel in PLAIN.chosen(Operation.of(dtype)) if kernel.backend is Backend.CUTE
    ]
    check(Problem(m=33, n=783, k=4096, dtype=dtype), some, built, device, model)
