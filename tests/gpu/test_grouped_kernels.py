"""Kernels of grouped products: gradients that are added to, gates with factors, and gradients of
these. `test_kernels` has the spreads of tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.ops.engine.forms import Form, Spec, shapes
from gemmsmith.ops.engine.operands import present
from tests.gpu.support.building import plan_of
from tests.gpu.support.choosing import Ground, tuned
from tests.gpu.support.families import (
    EVERY_BACKWARD_TILE,
    EVERY_TILE,
    GROUPED,
    check,
    problem_of,
)
from tests.gpu.support.layers import near
from tests.support.mixtures import close, compared
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


@pytest.mark.parametrize("factors", [False, True])
def test_a_backward_gate_has_factors_or_none(built: dict[str, Path], factors: bool) -> None:
    """Their gradient is asked for where there are factors; other ends and NaN as above."""
    torch.manual_seed(20261126)
    tokens, inner, k, experts = 333, 392, 136, 5
    wide = torch.full((experts, k, inner + 8), torch.nan, device="cuda").bfloat16()
    wide[..., :inner] = (torch.randn(experts, k, inner) * k**-0.5).bfloat16().cuda()
    weight = wide[..., :inner]
    dy = torch.randn(tokens, k, device="cuda").bfloat16()
    aux = torch.randn(tokens, 2 * inner, device="cuda").bfloat16()
    rows = torch.rand(tokens, device="cuda")
    (shape,) = shapes(
        Form.GROUPED,
        Spec.of(dy),
        Spec.of(weight),
        groups=experts,
        epilogue=EVERY_BACKWARD_TILE.epilogue,
    )
    for number, kernel in enumerate(GROUPED.chosen(EVERY_BACKWARD_TILE)):
        if refusal(kernel, shape.problem) is not None:
            continue
        last = tokens - number % 3
        ends = torch.tensor([number % 7, 100, 100, 101, last], device="cuda", dtype=torch.int32)
        plan = plan_of(kernel, shape, built)
        value = plan.outputs()["activated"].fill_(7.0)
        sums = torch.full((tokens, -(-inner // 64)), 7.0, device="cuda")
        beside = present(row_scale=rows, row_gradient=sums) if factors else {}
        d = torch.full((tokens, 2 * inner), 7.0, device="cuda").bfloat16()
        operands = present(offsets=ends, aux=aux, activated=value, d=d)
        assert plan(dy, weight, {**operands, **beside}) is not None
        begin = 0
        for group, end in enumerate(ends.tolist()):
            run, begin = slice(begin, end), end
            product = dy[run].double() @ weight[group].double()
            opened, share = aux[run].double().requires_grad_(), rows[run, None].double()
            share = share.requires_grad_() if factors else torch.ones_like(share)
            gate, up = opened.chunk(2, -1)
            wanted = functional.silu(gate) * up * share
            (of_opened,) = torch.autograd.grad(wanted, opened, product, retain_graph=True)
            assert near(d[run], of_opened), kernel.name
            assert near(value[run], wanted.detach()), kernel.name
            if factors:
                (of_share,) = torch.autograd.grad(wanted, share, product)
                assert near(sums[run].sum(-1, keepdim=True), of_share, 1e-4), kernel.name
        assert all(bool((written[last:] == 7.0).all()) for written in (d, value, sums)), kernel.name


@pytest.mark.parametrize("inner", [64, 136, 768])
def test_a_layer_that_is_opened_and_differentiated_by_kernels(
    model: DeviceModel, inner: int
) -> None:
    torch.manual_seed(20261126)
    tokens, chosen, experts, width = 1000, 4, 16, 256
    operations = (
        EVERY_TILE,
        EVERY_BACKWARD_TILE,
        Operation.of("bf16.group_rows.then_dsilu_gate", "tt"),
    )
    kernels = [kernel for operation in operations for kernel in GROUPED.chosen(operation)]
    sizes = (tokens, width), (tokens, chosen), (experts, 2 * inner, width), (experts, width, inner)
    scales = 1.0, 1.0 / chosen, width**-0.5, inner**-0.5
    index = torch.rand(tokens, experts + 2).topk(chosen).indices.cuda()
    for frozen in (False, True):
        operands = [
            (torch.randn(size, device="cuda") * scale)
            .bfloat16()
            .requires_grad_(at < 2 or not frozen)
            for at, (size, scale) in enumerate(zip(sizes, scales, strict=True))
        ]
        with tuned(Ground.of(model, kernels)) as launched:
            for mine, exactly in compared(gemmsmith.experts, operands, index):
                close(mine, exactly)
            assert launched() == 2
