"""What cuBLAS runs, as CUDA's profiler names it here: the tuner's hint comes from these names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemmsmith.core.problem import DType, Problem
from tuner.devices.cuda import CudaDevice
from tuner.search.hints import choice_of


@pytest.mark.parametrize(
    "problem",
    [Problem(m=4096, n=4096, k=4096), Problem(m=4096, n=4096, k=4096, dtype=DType.FP8_E4M3)],
    ids=lambda problem: str(problem.dtype),
)
def test_the_kernels_of_cublas_have_names_that_are_understood(
    problem: Problem, device: CudaDevice, record_property: Callable[[str, object], None]
) -> None:
    names = device.baseline_kernels(problem)
    record_property("baseline_kernels", list(names))
    assert names
    choice = choice_of(names)
    assert choice is not None, names
    record_property("choice", str(choice))
    assert all(8 <= extent <= 512 for extent in choice.tile)
    assert choice.depth * problem.operation.a.bytes in (64, 128, 256)
