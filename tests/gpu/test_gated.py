"""`gemmsmith.gated_linear` and `mlp` on the device.

The reference is FP64 of the very operands; gradients are compared with autograd of it. What needs
no CUDA runs on the host as well, with stand-in kernels: tests/unit/ops/test_gated.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.epilogue import GATES
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import DType, Problem
from tests.gpu.support.building import build
from tests.gpu.support.choosing import Ground, tuned
from tuner.backends import Level, kernels, refusal

CASES = 300
KERNELS = 3
"""Of each operation."""
BOUND = 1e-2
"""Relative error in the Frobenius norm: rounding of a result in bf16."""
GRADIENT_BOUND = 2e-2
"""And of gate and up, and of their gradients, on the way to the products."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}
LAYOUTS = ("halves", "interleaved", "two")
KINDS = tuple((activation, layout) for activation in GATES for layout in LAYOUTS)

OPERATIONS = (
    *(Operation.of("bf16", epilogue=each) for each in Epilogue if each.is_gated),
    Operation.of("bf16"),
    Operation.of("bf16", "tt"),
    Operation.of("bf16", "nt"),
)
"""Forwards, and the bare products of the backward pass."""

Given = list[torch.Tensor | None]


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    chosen = [
        kernel
        for operation in OPERATIONS
        for kernel in kernels(Problem.of(operation, 4096, 1536, 1024), level=Level.CORE)[:KERNELS]
    ]
    store, _ = build(chosen)
    return Ground(
        device=torch.device("cuda:0"),
        model=model,
        types=(DType.BF16,),
        sizes=(528, 784, 1056),
        largest=4096,
        kernels=lambda problem: [one for one in chosen if refusal(one, problem) is None],
        store=store,
        compilers=({}, {"mode": "reduce-overhead"}),
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def leaf(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * scale).bfloat16().requires_grad_()


def operands(rows: tuple[int, ...], inner: int, k: int, layout: str) -> Given:
    """x, weight and up."""
    scale = k**-0.5
    if layout == "two":
        return [leaf(*rows, k), leaf(inner, k, scale=scale), leaf(inner, k, scale=scale)]
    return [leaf(*rows, k), leaf(2 * inner, k, scale=scale), None]


def ours(given: Given, activation: str, layout: str) -> torch.Tensor:
    x, weight, up = given
    assert x is not None
    assert weight is not None
    return gemmsmith.gated_linear(
        x, weight, up, activation=activation, interleaved=layout == "interleaved"
    )


def exact(given: Given, activation: str, layout: str) -> torch.Tensor:
    """In FP64, differentiable."""
    x, weight, up = (None if one is None else one.double() for one in given)
    assert x is not None
    assert weight is not None
    if layout == "halves":
        weight, up = weight.chunk(2)
    elif layout == "interleaved":
        weight, up = weight.unflatten(0, (-1, 2)).unbind(1)
    assert up is not None
    return ACTIVATIONS[activation](functional.linear(x, weight)) * functional.linear(x, up)


def close(found: torch.Tensor | None, wanted: torch.Tensor, bound: float) -> None:
    assert found is not None
    assert found.shape == wanted.shape
    difference = torch.linalg.vector_norm(found.detach().double() - wanted).item()
    assert difference <= bound * torch.linalg.vector_norm(wanted).item()


def step(given: Given, activation: str, layout: str, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, and every gradient."""
    leaves = [one for one in given if one is not None]
    out = ours(given, activation, layout)
    return [out, *torch.autograd.grad(out, leaves, dy)]


def compare(
    found: list[torch.Tensor], given: Given, activation: str, layout: str, dy: torch.Tensor
) -> None:
    leaves = [one for one in given if one is not None]
    out = exact(given, activation, layout)
    close(found[0], out.detach(), BOUND)
    wanted = torch.autograd.grad(out, leaves, dy.double())
    for mine, theirs in zip(found[1:], wanted, strict=True):
        close(mine, theirs.double(), GRADIENT_BOUND)


def test_300_random_layers_against_fp64(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    """Forwards and backwards, whoever takes it: sizes that no kernel reads are among them."""
    chance = random.Random(20261123)
    launched_ones = 0
    for case in range(CASES):
        activation, layout = KINDS[case % len(KINDS)]
        m, inner, k = (max(16, round(ground.largest ** chance.random())) for _ in range(3))
        if chance.random() < 0.9:
            inner, k = -(-inner // 8) * 8, -(-k // 8) * 8
        rows = (2, m // 2) if chance.random() < 0.5 else (m,)
        given = operands(rows, inner, k, layout)
        dy = torch.randn(*rows, inner, device="cuda").bfloat16()
        with tuned(ground) as launched:
            found = step(given, activation, layout, dy)
            launched_ones += launched()
        compare(found, given, activation, layout, dy)
        with tuned(ground), torch.no_grad():
            close(
                ours(given, activation, layout),
                exact(given, activation, layout).detach(),
                BOUND,
            )
    record_property("by_tuned_kernels", launched_ones)
    assert launched_ones > CASES * 2


@pytest.mark.parametrize(("activation", "layout"), KINDS)
def test_a_graph_is_replayed_with_other_operands(
    ground: Ground, activation: str, layout: str
) -> None:
    given = operands((512,), 768, 256, layout)
    dy = torch.randn(512, 768, device="cuda").bfloat16()
    expected = 5 if layout == "two" else 3
    with tuned(ground) as launched:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(given, activation, layout, dy)
        torch.cuda.current_stream().wait_stream(stream)
        assert launched() == expected
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(given, activation, layout, dy)
        assert launched() == expected
    for _ in range(3):
        with torch.no_grad():
            for one in (*given, dy):
                if one is not None:
                    one.copy_(torch.randn_like(one) * one.shape[-1] ** -0.25)
        graph.replay()
        compare(found, given, activation, layout, dy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_functions_hold_gated_kernels(ground: Ground, layout: str) -> None:
    given = operands((4, 128), 768, 256, layout)
    dy = torch.randn(4, 128, 768, device="cuda").bfloat16()
    for options in ground.compilers:
        with tuned(ground) as launched:
            compiled = torch.compile(
                lambda *some: ours(list(some), "silu", layout), fullgraph=True, **options
            )
            leaves = [one for one in given if one is not None]
            out = compiled(*given)
            found = [out, *torch.autograd.grad(out, leaves, dy)]
            found = [one.clone() for one in found]
            assert launched() >= 3
        compare(found, given, "silu", layout, dy)


def test_equal_inputs_give_equal_bits(ground: Ground) -> None:
    given = operands((1024,), 768, 1024, "halves")
    dy = torch.randn(1024, 768, device="cuda").bfloat16()
    with tuned(ground, deterministic=True) as launched:
        first = step(given, "silu", "halves", dy)
        assert launched() == 3
        for _ in range(20):
            again = step(given, "silu", "halves", dy)
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
