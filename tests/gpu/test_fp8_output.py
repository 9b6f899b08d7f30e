"""Kernels with an FP8 output: what saturates, and the largest value.

`test_kernels` has the sizes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.operands import present
from tests.gpu.support.building import plan_of
from tests.gpu.support.families import FP8_OUTPUT, problem_of
from tuner.backends import refusal

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return FP8_OUTPUT.built()


@pytest.mark.parametrize(
    "operation", FP8_OUTPUT.operations, ids=lambda operation: operation.epilogue.value
)
@pytest.mark.parametrize("extents", [(528, 1568, 2080), (5, 96, 64)], ids=str)
def test_results_saturate_and_the_largest_value_runs(
    operation: Operation, extents: tuple[int, int, int], built: dict[str, Path]
) -> None:
    """Against FP64. The last column's product cancels its bias, which is alone in rows beyond M: a
    kernel that read those rows would return a larger value.
    """
    torch.manual_seed(20261125)
    m, n, k = extents
    problem, epilogue = problem_of(operation, extents), operation.epilogue
    x, weight = ((torch.randn(rows, k, device="cuda") * 16).to(FP8) for rows in (m, n))
    one = torch.tensor([1 / 16], device="cuda")
    other = torch.tensor([k**-0.5 / 16], device="cuda")
    bias = None
    if epilogue.has_bias:
        bias = torch.linspace(-2.0, 2.0, n, device="cuda").bfloat16()
        bias[-1] = 28.0
        x[:, :64] = 16.0
        weight[-1] = 0.0
        weight[-1, :64] = -28.0 / 64 / float(other)
    linear = functional.linear(x.double(), weight.double()) * (one * other).double()
    gate, up = (linear + bias.double(), None) if bias is not None else linear.chunk(2, -1)
    value = gate if epilogue.activation is None else ACTIVATIONS[epilogue.activation](gate)
    if up is not None:
        value = value * up
    first, second = (weight, None) if bias is not None else weight.chunk(2)
    right = first.t()
    (shape, *_) = shapes(Form.SCALED, Spec.of(x), Spec.of(right), FP8, epilogue=epilogue)
    assert shape.problem == problem
    largest = float(value.abs().max())
    for kernel in FP8_OUTPUT.chosen(operation):
        if refusal(kernel, problem) is not None:
            continue
        plan = plan_of(kernel, shape, built)
        up_t = None if second is None else second.t()
        for scale in (None, 0.5, 4096.0):
            scale_d = None if scale is None else torch.tensor([scale], device="cuda")
            for before in (None, 0.0, 2 * largest):
                amax = None if before is None else torch.tensor([before], device="cuda")
                operands = present(bias=bias, up=up_t, scale_d=scale_d, amax=amax)
                found = plan(x, right, {**operands, "scale_a": one, "scale_b": other})
                assert found is not None
                assert found.dtype is FP8
                expected = (value * (scale or 1.0)).clamp(-448, 448)
                bound = 0.07 * expected.abs() + 0.02 * (1 + (scale or 1.0))
                close = (found.double() - expected).abs() <= bound
                assert bool(close.all()), (kernel.name, scale)
                if amax is not None and before is not None:
                    wanted = max(before, largest)
                    assert float(amax) == pytest.approx(wanted, rel=1e-2), kernel.name
