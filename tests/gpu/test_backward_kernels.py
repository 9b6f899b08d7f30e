"""Kernels with backward epilogues against FP64 on random sizes, and in the gradients of MLPs.

`test_kernels` has the sizes of which the measuring child verifies them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.epilogue import Backward
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import DType, Problem
from gemmsmith.ops.products.backward import by_kernel
from tests.gpu.support.choosing import Ground, first_kernels, tuned
from tests.gpu.support.families import BACKWARD
from tests.gpu.support.layers import BOUND, GRADIENT_BOUND, close, warm_up
from tests.support import epilogues

CASES = 300


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    plain = [Operation.of("bf16", layout) for layout in ("tn", "tt", "nt")]
    forwards = [Operation.of("bf16", epilogue="bias_gelu_tanh_aux")]
    others = [Problem.of(operation, 4096, 768, 1024) for operation in (*plain, *forwards)]
    chosen = [kernel for each in BACKWARD.operations for kernel in BACKWARD.chosen(each)]
    types = (DType.BF16, DType.FP16)
    return Ground.of(model, [*chosen, *first_kernels(others)], types)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def right(parts: Backward, product: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor | None]:
    """D, the value and the bias gradient by autograd in FP64."""
    leaf = aux.double().requires_grad_()
    gate, up = leaf.chunk(2, -1) if parts.gated else (leaf, None)
    value = ACTIVATIONS[parts.activation](gate)
    if up is not None:
        value = value * up
    (gradient,) = torch.autograd.grad(value, leaf, product)
    return [
        gradient,
        value.detach() if parts.activated else None,
        gradient.sum(0) if parts.bias_gradient else None,
    ]


def test_300_random_sizes_against_fp64(ground: Ground) -> None:
    """Each output by itself: of every epilogue and type, as the operators launch them."""
    chance = random.Random(20261123)
    with tuned(ground) as launched:
        for case in range(CASES):
            epilogue = epilogues.BACKWARD[case % len(epilogues.BACKWARD)]
            dtype = (torch.bfloat16, torch.float16)[case // len(epilogues.BACKWARD) % 2]
            parts = epilogue.backward
            assert parts is not None
            m, n, k = (max(1, round(ground.largest ** chance.random())) for _ in range(3))
            n, k = -(-n // 8) * 8, -(-k // 8) * 8
            dy = torch.randn(m, k, device="cuda").to(dtype)
            weight = (torch.randn(k, n, device="cuda") * k**-0.5).to(dtype)
            aux = torch.randn(m, n * parts.halves, device="cuda").to(dtype)
            found = by_kernel(dy, weight, aux, epilogue)
            assert found is not None, f"{epilogue} {m}×{n}×{k} {dtype}"
            assert launched() == 1
            product = dy.double() @ weight.double()
            for mine, wanted in zip(found, right(parts, product, aux), strict=True):
                assert (mine is None) == (wanted is None)
                if wanted is not None:
                    close(mine, wanted, BOUND if dtype is torch.bfloat16 else BOUND / 5)


def test_equal_inputs_give_equal_bits(ground: Ground) -> None:
    """Sums of rows too: they are added up in a fixed order."""
    dy = torch.randn(4000, 768, device="cuda").bfloat16()
    weight, aux = torch.randn(768, 1024, device="cuda"), torch.randn(4000, 1024, device="cuda")
    operands = (dy, weight.bfloat16(), aux.bfloat16(), Epilogue.DGELU_TANH_BGRAD)
    with tuned(ground, deterministic=True):
        first = by_kernel(*operands)
        assert first is not None
        for _ in range(20):
            again = by_kernel(*operands)
            assert again is not None
            assert torch.equal(first[0], again[0])
            assert first[2] is not None
            assert again[2] is not None
            assert torch.equal(first[2], again[2])


def weight(rows: int, columns: int) -> torch.Tensor:
    drawn = torch.randn(rows, columns, device="cuda") * columns**-0.5
    return drawn.bfloat16().requires_grad_()


def operands(m: int, hidden: int, inner: int, kind: str) -> list[Any]:
    x = torch.randn(m, hidden, device="cuda").bfloat16().requires_grad_()
    if kind == "joined":
        return [x, weight(2 * inner, hidden), None, weight(hidden, inner)]
    if kind == "apart":
        return [x, weight(inner, hidden), weight(inner, hidden), weight(hidden, inner)]
    biases = [
        torch.randn(size, device="cuda").bfloat16().requires_grad_() for size in (inner, hidden)
    ]
    return [x, weight(inner, hidden), biases[0], weight(hidden, inner), biases[1]]


def mlp(given: list[Any], activation: str, **options: Any) -> torch.Tensor:
    x, weight, *rest = given
    named = ("bias", "down", "down_bias") if len(rest) == 3 else ("up", "down")
    arguments = dict(zip(named, rest, strict=True)) | options
    return gemmsmith.mlp(x, weight, activation=activation, **arguments)


def exact(given: list[Any], activation: str) -> torch.Tensor:
    """In FP32, differentiable."""
    x, *rest = (None if one is None else one.float() for one in given)
    assert x is not None
    if len(rest) == 4:
        w1, b1, w2, b2 = rest
        return functional.linear(ACTIVATIONS[activation](functional.linear(x, w1, b1)), w2, b2)
    gate, up, down = rest
    both = functional.linear(x, gate if up is None else torch.cat([gate, up]))
    first, second = both.chunk(2, -1)
    return functional.linear(ACTIVATIONS[activation](first) * second, down)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        # Others have no kernel of a layer with a bias.
        *(("plain", name) for name in ACTIVATIONS if Epilogue.made_of(bias=True, activation=name)),
        *(
            (kind, activation)
            for kind in ("joined", "apart")
            for activation in ("silu", "gelu_tanh")
        ),
    ],
)
def test_gradients_of_mlps_are_those_of_the_fp32_model(
    ground: Ground, kind: str, activation: str, recompute: bool
) -> None:
    for m, hidden, inner in ((1024, 768, 3072), (333, 256, 1048)):
        given = operands(m, hidden, inner, kind)
        leaves = [one for one in given if one is not None]
        with tuned(ground) as launched:
            out = mlp(given, activation, recompute=recompute)
            assert "MLP" in type(out.grad_fn).__name__
            dy = torch.randn_like(out)
            launched()
            found = torch.autograd.grad(out, leaves, dy)
            assert launched() >= 1
        wanted = exact(given, activation)
        close(out, wanted.detach().double(), BOUND)
        expected = torch.autograd.grad(wanted, leaves, dy.float())
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs.double(), GRADIENT_BOUND)


@pytest.mark.parametrize("kind", ["plain", "joined"])
def test_a_graph_is_replayed_with_other_operands(ground: Ground, kind: str) -> None:
    given = operands(512, 256, 768, kind)
    leaves = [one for one in given if one is not None]
    dy = torch.randn(512, 256, device="cuda").bfloat16()

    def step() -> list[torch.Tensor]:
        out = mlp(given, "silu")
        return [out, *torch.autograd.grad(out, leaves, dy)]

    with tuned(ground):
        warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
    for _ in range(3):
        with torch.no_grad():
            given[0].copy_(torch.randn_like(given[0]))
            dy.copy_(torch.randn_like(dy))
        graph.replay()
        wanted = exact(given, "silu")
        close(found[0], wanted.detach().double(), BOUND)
        expected = torch.autograd.grad(wanted, leaves, dy.float())
        for mine, theirs in zip(found[1:], expected, strict=True):
            close(mine, theirs.double(), GRADIENT_BOUND)


def test_peak_memory_is_not_above_torchs(ground: Ground) -> None:
    def peak(call: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> int:
        out = call()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        del out
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    given = operands(4096, 1024, 4096, "joined")
    leaves = [one for one in given if one is not None]

    def torchs() -> torch.Tensor:
        first, second = functional.linear(given[0], given[1]).chunk(2, -1)
        return functional.linear(functional.silu(first) * second, given[3])

    with tuned(ground):
        mine = peak(lambda: mlp(given, "silu"), leaves)
    assert mine <= peak(torchs, leaves)
