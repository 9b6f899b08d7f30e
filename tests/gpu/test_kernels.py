"""Kernels of every family as the measuring child verifies them, and every way that torch programs
have of computing the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from tests.gpu.support.families import FAMILIES, Family, Size, check, problem_of
from tests.gpu.support.layers import near
from tuner.devices.cuda import CudaDevice
from tuner.workloads import ways
from tuner.workloads.operands import Operands, bits
from tuner.workloads.workload import Block, drawn_with


@pytest.fixture
def built(family: Family) -> dict[str, Path]:
    return family.built()


@pytest.mark.parametrize(
    ("family", "operation", "size"),
    [
        pytest.param(family, operation, size, id=f"{operation.key}-{size}")
        for family in FAMILIES
        for operation in family.operations
        for size in family.sizes
    ],
)
def test_every_kind_is_right(
    family: Family,
    operation: Operation,
    size: Size,
    built: dict[str, Path],
    device: CudaDevice,
    model: DeviceModel,
) -> None:
    problem = problem_of(operation, size)
    members = [kernel for kernel in family.chosen(operation) if family.takes(kernel, problem)]
    check(problem, members, built, device, model)


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        pytest.param(operation, family.sizes[0], id=operation.key)
        for family in FAMILIES
        for operation in family.operations
        if operation.is_fused and not operation.is_grouped
    ],
)
def test_every_way_of_torchs_computes_the_same(
    operation: Operation, size: Size, model: DeviceModel
) -> None:
    """The default, compiled sequences and the library's own fusions, against FP32."""
    problem = problem_of(operation, size)
    operands = Operands(problem, model, 0, seed=20261123)
    workload = operands.workload
    (case,) = operands.cases
    first = operands.sets[0]
    everything = Block(
        batches=slice(0, len(case.sigmas)),
        rows=slice(0, case.written),
        columns=slice(0, problem.columns),
    )
    reference = workload.product(problem, first, everything).double()
    defaults, bound = workload.defaults(problem), 4e-2 if operation.stores_fp8 else 1e-2
    name, _ = ways.first_that_runs(defaults, problem, operands.sets, operands.room)
    assert name == defaults[0].name
    for way in (defaults[0], *workload.alternatives(problem)):
        operands.restart(first)
        bits(first.d).zero_()
        output = way.launches(problem, operands.sets, operands.room)[0]()
        assert len(output) in (problem.m, case.written)
        assert near(output, reference[0, : len(output)], bound), way.name
        if way is defaults[0] and operation.epilogue.stores_aux:
            assert near(first.d[1:], reference[1:], bound)
        if way is defaults[0] and operation.stores_fp8:
            largest = float(reference.abs().max() / drawn_with(first.scale_d))
            assert float(drawn_with(first.amax)) == pytest.approx(largest, rel=1e-2)
