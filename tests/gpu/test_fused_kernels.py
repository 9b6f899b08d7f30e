"""Fused kernels, one of each kind, as the measuring child verifies them: both outputs, poisoned
first, on sizes that no tile divides; and every way that torch programs have of computing them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import Kernel, cutlass
from gemmsmith.core.problem import Problem
from tests.gpu.support.building import build
from tests.gpu.test_operations import check
from tests.support.epilogues import FUSED
from tuner.backends import kernels
from tuner.devices.cuda import CudaDevice
from tuner.workloads import ways
from tuner.workloads.operands import Operands
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block

FAMILIES = (
    *((f"bf16.then_{epilogue}", "tn") for epilogue in FUSED),
    ("bf16.then_bias_gelu_tanh_aux", "tt"),
    ("fp16.then_bias_gelu_tanh", "tn"),
    ("fp16.then_bias_gelu_aux", "tn"),
    ("fp16.then_bias_silu", "tn"),
    ("fp16.then_bias_residual", "tt"),
    ("fp8_e4m3.then_bias_silu_aux", "tn"),
    ("fp8_e4m3.then_bias_residual", "tn"),
    ("bf16.then_bias_scale_residual_aux", "tt"),
    ("bf16.then_row_scale_bias", "tt"),
    ("fp16.then_scale_residual", "tn"),
    ("fp16.then_bias_scale_residual_aux", "tt"),
    ("fp16.then_row_scale", "tn"),
    ("fp16.then_row_scale_bias", "tt"),
    ("fp8_e4m3.then_scale_residual", "tn"),
    ("fp8_e4m3.then_bias_scale_residual_aux", "tn"),
    ("fp8_e4m3.then_row_scale", "tn"),
    ("fp8_e4m3.then_row_scale_bias", "tn"),
)


def problem(dtype: str, layout: str, m: int = 528, n: int = 784, k: int = 2080) -> Problem:
    """No extent is a multiple of a tile, but rows are of 16 bytes."""
    return Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)


@cache
def chosen(dtype: str, layout: str) -> tuple[Kernel, ...]:
    """The first kernel of each mainloop and orientation."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in map(cutlass, kernels(problem(dtype, layout))):
        found.setdefault((kernel.mainloop, kernel.swapped), kernel)
    return tuple(found.values())


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    """The packs of all kernels, by kernel."""
    wanted = [kernel for family in FAMILIES for kernel in chosen(*family)]
    return build(wanted)[1]


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
    check(problem(dtype, layout, *extents), chosen(dtype, layout), built, device, model)


@pytest.mark.parametrize(("dtype", "layout"), FAMILIES)
def test_every_way_of_torchs_computes_the_same(dtype: str, layout: str, model: DeviceModel) -> None:
    """The default, the compiled sequence and the library's own fusions, against FP32."""
    asked = problem(dtype, layout)
    operands = Operands(asked, model, 0, seed=20261123)
    workload = workload_of(asked.operation)
    (case,) = operands.cases
    first = operands.sets[0]
    outputs = slice(0, len(case.sigmas))
    everything = Block(batches=outputs, rows=slice(0, asked.m), columns=slice(0, asked.n))
    wanted = workload.product(asked, first, everything).double()
    name, _ = ways.first_that_runs(workload.defaults(asked), asked, operands.sets, operands.room)
    default = next(way for way in workload.defaults(asked) if way.name == name)
    assert name == workload.defaults(asked)[0].name
    for way in (default, *workload.alternatives(asked)):
        first.d.zero_()
        found = way.launches(asked, operands.sets, operands.room)[0]().double()
        assert _error(found, wanted[0]) < 1e-2, way.name
        if way is default and len(wanted) > 1:
            assert _error(first.d[1].double(), wanted[1]) < 1e-2


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))
