"""Gated kernels: layouts of the weight. `test_kernels` has the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import DType
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from tests.gpu.support.building import plan_of
from tests.gpu.support.families import GATED
from tests.gpu.support.layers import near
from tuner.backends import refusal


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return GATED.built()


@pytest.mark.parametrize(
    "operation",
    [operation for operation in GATED.operations if not operation.is_scaled],
    ids=lambda operation: operation.dtype,
)
@pytest.mark.parametrize("layout", ["halves", "interleaved", "two", "spaced"])
def test_every_layout_of_the_weight_is_read(
    operation: Operation, layout: str, built: dict[str, Path]
) -> None:
    """By its own strides, against FP64; what lies between the weight's rows is NaN."""
    torch.manual_seed(20261123)
    m, n, k = 520, 1040, 328
    kind = torch.bfloat16 if operation.types is DType.BF16 else torch.float16
    x = torch.randn(m, k, device="cuda").to(kind)
    parts = [(torch.randn(n // 2, k, device="cuda") * k**-0.5).to(kind) for _ in range(2)]
    if layout == "halves":
        gate, up = torch.cat(parts).chunk(2)
    elif layout == "interleaved":
        gate, up = torch.stack(parts, 1).view(n, k).unflatten(0, (-1, 2)).unbind(1)
    elif layout == "two":
        gate, up = parts
    else:
        wide = torch.full((2, n // 2, k + 24), torch.nan, dtype=kind, device="cuda")
        wide[:, :, :k] = torch.stack(parts)
        gate, up = wide[:, :, :k].unbind()
    epilogue = operation.epilogue
    (shape,) = shapes(Form.LINEAR, Spec.of(x), Spec.of(gate), epilogue=epilogue)
    first = functional.linear(x.double(), parts[0].double())
    second = functional.linear(x.double(), parts[1].double())
    assert epilogue.activation is not None
    wanted = ACTIVATIONS[epilogue.activation](first) * second
    for kernel in GATED.chosen(operation):
        if refusal(kernel, shape.problem) is not None:
            continue
        plan = plan_of(kernel, shape, built)
        outputs = plan.outputs()
        aux = outputs["aux"].fill_(torch.nan) if epilogue.stores_aux else None
        out = plan(x, gate, {**outputs, "up": up})
        assert out is not None
        assert near(out, wanted), kernel.name
        if aux is not None:
            assert near(aux, torch.cat([first, second], -1)), kernel.name
