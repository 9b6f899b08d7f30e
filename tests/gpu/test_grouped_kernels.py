"""Kernels of grouped products: gradients that are added to, and gates with factors.
`test_kernels` has the spreads of tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.operands import present
from tests.gpu.support.building import plan_of
from tests.gpu.support.families import EVERY_TILE, GROUPED, check, problem_of
from tests.gpu.support.layers import near
from tuner.backends import refusal
from tuner.devices.cuda import CudaDevice


@pytest.fixture(scope="module")
def built() -> dict[str, Path]:
    return GROUPED.built()


def test_gradients_are_added_to(
    built: dict[str, Path], device: CudaDevice, model: DeviceModel
) -> None:
    adding = Operation.of("bf16.out_f32.group_depth.accumulate", "nt")
    members = GROUPED.chosen(adding.of_kernels)
    check(problem_of(adding, GROUPED.sizes[0]), members, built, device, model)


@pytest.mark.parametrize("factors", [False, True])
def test_a_gate_has_factors_or_none(built: dict[str, Path], factors: bool) -> None:
    """By a model's strides, with NaN between the rows of its weights, and other ends each time."""
    torch.manual_seed(20261125)
    tokens, inner, k, experts = 333, 392, 136, 5
    wide = torch.full((experts, 2 * inner, k + 8), torch.nan, device="cuda").bfloat16()
    wide[:, :, :k] = (torch.randn(experts, 2 * inner, k) * k**-0.5).bfloat16().cuda()
    gate, up = wide[:, :, :k].mT.chunk(2, dim=-1)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    rows = torch.rand(tokens, device="cuda") if factors else None
    (shape,) = shapes(
        Form.GROUPED, Spec.of(x), Spec.of(gate), groups=experts, epilogue=EVERY_TILE.epilogue
    )
    for number, kernel in enumerate(GROUPED.chosen(EVERY_TILE)):
        if refusal(kernel, shape.problem) is not None:
            continue
        last = tokens - number % 3
        ends = torch.tensor([number % 7, 100, 100, 101, last], device="cuda", dtype=torch.int32)
        plan = plan_of(kernel, shape, built)
        aux = plan.outputs()["aux"].fill_(7.0)
        out = plan(x, gate, present(offsets=ends, aux=aux, up=up, row_scale=rows))
        assert out is not None
        begin = 0
        for group, end in enumerate(ends.tolist()):
            run, begin = slice(begin, end), end
            first, second = (x[run].double() @ one[group].double() for one in (gate, up))
            wanted = functional.silu(first) * second
            wanted = wanted if rows is None else wanted * rows[run, None]
            assert near(out[run], wanted), kernel.name
            assert near(aux[run], torch.cat([first, second], -1)), kernel.name
        assert bool((aux[last:] == 7.0).all()), kernel.name
