"""`gemmsmith.gated_linear` and `mlp` on the device.

The reference is FP64 of the very operands; gradients are compared with autograd of it. What needs
no CUDA runs on the host as well, with stand-in kernels: tests/unit/ops/test_gated.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.epilogue import GATES
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tests.gpu.support.choosing import Ground, first_kernels, tuned
from tests.gpu.support.layers import (
    BOUND,
    Layer,
    Operands,
    close,
    compare,
    leaf,
    step,
    warm_up,
)

CASES = 300
LAYOUTS = ("halves", "interleaved", "two")
KINDS = tuple((activation, layout) for activation in GATES for layout in LAYOUTS)

OPERATIONS = (
    *(Operation.of("bf16", epilogue=each) for each in Epilogue if each.is_gated),
    Operation.of("bf16"),
    Operation.of("bf16", "tt"),
    Operation.of("bf16", "nt"),
)
"""Forwards, and the bare products of the backward pass."""


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    problems = [Problem.of(operation, 4096, 1536, 1024) for operation in OPERATIONS]
    return Ground.of(model, first_kernels(problems))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def operands(rows: tuple[int, ...], inner: int, k: int, layout: str) -> Operands:
    scale = k**-0.5
    if layout == "two":
        weights = {"weight": leaf(inner, k, scale=scale), "up": leaf(inner, k, scale=scale)}
    else:
        weights = {"weight": leaf(2 * inner, k, scale=scale)}
    return {"x": leaf(*rows, k), **weights}


def of(activation: str, layout: str, call: Layer = gemmsmith.gated_linear) -> Layer:
    return partial(call, activation=activation, interleaved=layout == "interleaved")


def exact(activation: str, layout: str) -> Layer:
    def layer(
        x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layout == "halves":
            weight, up = weight.chunk(2)
        elif layout == "interleaved":
            weight, up = weight.unflatten(0, (-1, 2)).unbind(1)
        assert up is not None
        return ACTIVATIONS[activation](functional.linear(x, weight)) * functional.linear(x, up)

    return layer


@pytest.fixture
def _whole_sums() -> Iterator[None]:
    """cuBLAS rounds no parts of a sum to bf16.

    That turns the sign of arguments near 0, where ReLU's derivative jumps: with two parts and
    K = 2324, a weight's gradient is off by 2.7%.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.usefixtures("_whole_sums")
def test_300_random_layers_against_fp64(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    """Forwards and backwards, by a kernel or by torch: some sizes no kernel reads."""
    chance = random.Random(20261123)
    launched_ones = 0
    for case in range(CASES):
        activation, layout = KINDS[case % len(KINDS)]
        m, inner, k = (max(16, round(ground.largest ** chance.random())) for _ in range(3))
        if chance.random() < 0.9:
            inner, k = -(-inner // 8) * 8, -(-k // 8) * 8
        rows = (2, m // 2) if chance.random() < 0.5 else (m,)
        drawn = operands(rows, inner, k, layout)
        dy = torch.randn(*rows, inner, device="cuda").bfloat16()
        with tuned(ground) as launched:
            outputs = step(of(activation, layout), drawn, dy)
            launched_ones += launched()
        sizes = f"case {case}: {activation}, {layout}, {list(rows)}, I {inner}, K {k}"
        compare(outputs, exact(activation, layout), drawn, dy, sizes)
        with tuned(ground), torch.no_grad():
            wide = {name: tensor.double() for name, tensor in drawn.items()}
            close(of(activation, layout)(**drawn), exact(activation, layout)(**wide), BOUND)
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > CASES * 2


@pytest.mark.parametrize(("activation", "layout"), KINDS)
def test_a_graph_is_replayed_with_other_operands(
    ground: Ground, activation: str, layout: str
) -> None:
    drawn = operands((512,), 768, 256, layout)
    dy = torch.randn(512, 768, device="cuda").bfloat16()
    expected = 5 if layout == "two" else 3
    with tuned(ground) as launched:
        warm_up(lambda: step(of(activation, layout), drawn, dy))
        assert launched() == expected
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step(of(activation, layout), drawn, dy)
        assert launched() == expected
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*drawn.values(), dy):
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.25)
        graph.replay()
        compare(outputs, exact(activation, layout), drawn, dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_functions_hold_gated_kernels(ground: Ground, layout: str) -> None:
    drawn = operands((4, 128), 768, 256, layout)
    dy = torch.randn(4, 128, 768, device="cuda").bfloat16()
    for options in ground.compilers:
        with tuned(ground) as launched:
            compiled = torch.compile(gemmsmith.gated_linear, fullgraph=True, **options)
            outputs = [one.clone() for one in step(of("silu", layout, compiled), drawn, dy)]
            assert launched() >= 3
        compare(outputs, exact("silu", layout), drawn, dy)


def test_equal_inputs_give_equal_bits(ground: Ground) -> None:
    drawn = operands((1024,), 768, 1024, "halves")
    dy = torch.randn(1024, 768, device="cuda").bfloat16()
    with tuned(ground, deterministic=True) as launched:
        first = step(of("silu", "halves"), drawn, dy)
        assert launched() == 3
        for _ in range(20):
            again = step(of("silu", "halves"), drawn, dy)
            for one, other in zip(first, again, strict=True):
                assert torch.equal(one, other)


def test_a_feed_forward_layer_trains_as_torchs(ground: Ground) -> None:
    """100 steps of a SwiGLU layer: the loss ends where torch's does."""

    def losses(*, fused: bool) -> torch.Tensor:
        torch.manual_seed(7)
        weight, down = leaf(2 * 768, 256, scale=0.05), leaf(256, 768, scale=0.05)
        optimizer = torch.optim.SGD([weight, down], lr=0.05)
        x = torch.randn(512, 256, device="cuda").bfloat16()
        y = torch.sin(x.float())
        found = []
        for _ in range(100):
            if fused:
                out = gemmsmith.mlp(x, weight, down, residual=x)
            else:
                gate, up = functional.linear(x, weight).chunk(2, -1)
                out = functional.linear(functional.silu(gate) * up, down) + x
            loss = functional.mse_loss(out.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    torchs = losses(fused=False)
    with tuned(ground) as launched:
        mine = losses(fused=True)
        assert launched() >= 100 * 5
    assert (mine - torchs).abs().max() <= 2e-2 * torchs.max()
    assert mine[-1] < mine[0]
