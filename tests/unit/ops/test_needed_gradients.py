"""Autograd functions compute the gradients that are needed and keep what those need, no more.

Every function of ours is tried with every choice of operands that want a gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith.ops.products.mixture
import gemmsmith.ops.products.norms  # noqa: F401 - their functions are counted
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.functions import Linear, Matmul
from gemmsmith.ops.products.feedforward import MLP
from gemmsmith.ops.products.grouped import GroupedMm
from gemmsmith.ops.products.layer import FusedLinear, LinearFusion
from gemmsmith.ops.products.loss_passes import LossOptions
from gemmsmith.ops.products.losses import LinearCrossEntropy
from gemmsmith.ops.products.mixture import Experts
from gemmsmith.ops.products.norms import RMSNorm
from gemmsmith.ops.products.passes import Gate
from gemmsmith.ops.products.rotary import Rotary, Rotation
from tests.support.mixtures import clamped, reference

BF16 = torch.bfloat16
M, K, N, INNER, GROUPS = 6, 16, 32, 24, 3

Runs = Callable[[], int]
Needs = frozenset[str]
"""Names of the operands that want a gradient."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function, and what a call of it may cost.

    Attributes:
        function: of ours.
        operands: by name; those of floats may want a gradient.
        call: gives the result, of the operands.
        exact: the same by torch's operators, in any type.
        kept: the operands that the backward pass reads, of weights the layout alone.
        products: how many it computes.
    """

    function: type[torch.autograd.Function]
    operands: dict[str, torch.Tensor]
    call: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]
    kept: Callable[[Needs], Needs]
    products: Callable[[Needs], int]


def random(*size: int) -> torch.Tensor:
    return torch.randn(size).to(BF16)


def of(function: Any, *after: Any) -> Callable[..., torch.Tensor]:
    """A call with the operands, then these; its first result."""

    def call(*operands: torch.Tensor | None) -> torch.Tensor:
        found = function.apply(*operands, *after)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return call


def rules(**reads: str) -> Callable[[Needs], Needs]:
    """Which operands are read: for each, the names of those whose gradients read it."""
    split = {name: frozenset(readers.split()) for name, readers in reads.items()}
    return lambda needs: frozenset(name for name, readers in split.items() if readers & needs)


def each(*names: str) -> Callable[[Needs], int]:
    """A product for the gradient of each of these."""
    return lambda needs: len(needs & frozenset(names))


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def multiplied_by_runs(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    runs = itertools.pairwise([0, *ends.tolist()])
    return torch.cat([a[slice(*run)] @ one for run, one in zip(runs, b, strict=True)])


def experts_products(needs: Needs) -> int:
    return bool(needs - {"down"}) + len(needs & {"tokens", "gate_up", "down", "bias"})


def mlp_products(needs: Needs) -> int:
    return bool(needs & {"x", "weight", "bias"}) + len(needs & {"x", "weight", "down"})


HALVES = Rotation(
    half=K // 2, reads_pairs=False, writes_pairs=False, shares=False, has_pairs=False, sign=1
)


def rotated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """All elements of both results by the function, of Q and K in bf16."""
    order = (q.stride(), k.stride())
    both: Any = Rotary.apply(q, k, *factors(q.dtype), HALVES, q.dtype, order)  # type: ignore[no-untyped-call]
    return torch.cat([x.flatten() for x in both])


def rotated_by_torch(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cos, sin = factors(q.dtype)
    turned = (torch.cat([-x[..., K // 2 :], x[..., : K // 2]], -1) for x in (q, k))
    results = (x * cos + other * sin for x, other in zip((q, k), turned, strict=True))
    return torch.cat([x.flatten() for x in results])


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0, 3, M * K).view(1, 1, M, K)
    return angles.cos().to(BF16).to(dtype), angles.sin().to(BF16).to(dtype)


def cases() -> dict[str, Case]:
    x, weight, bias = random(M, K), random(N, K), random(N)
    bias_gelu = Epilogue.made_of(bias=True, activation="gelu", aux=True)
    gate = Epilogue.made_of(activation="silu", gate=True, aux=True)
    assert bias_gelu is not None
    assert gate is not None
    ends = torch.tensor([2, 2, M], dtype=torch.int32)
    index = torch.randint(GROUPS + 1, (M, 2))
    routed = {
        "tokens": x,
        "index": index,
        "shares": random(M, 2),
        "gate_up": random(GROUPS, 2 * INNER, K),
        "down": random(GROUPS, K, INNER),
    }
    every = "tokens shares gate_up down bias"
    dense = rules(x="weight", weight="x")
    return {
        "linear": Case(
            function=Linear,
            operands={"x": x, "weight": weight, "bias": bias},
            call=of(Linear, None, None),
            exact=functional.linear,
            kept=dense,
            products=each("x", "weight"),
        ),
        "matmul": Case(
            function=Matmul,
            operands={"a": x, "b": random(K, N)},
            call=of(Matmul),
            exact=torch.matmul,
            kept=rules(a="b", b="a"),
            products=each("a", "b"),
        ),
        "fused": Case(
            function=FusedLinear,
            operands={"x": x, "weight": weight, "bias": bias},
            call=of(FusedLinear, LinearFusion(bias_gelu, ("bias",))),
            exact=lambda *operands: functional.gelu(functional.linear(*operands)),
            kept=rules(x="weight", weight="x weight"),
            products=each("x", "weight"),
        ),
        "gated": Case(
            function=FusedLinear,
            operands={"x": x, "weight": random(2 * N, K)},
            call=of(FusedLinear, LinearFusion(gate)),
            exact=gated,
            kept=rules(x="weight", weight="x weight"),
            products=each("x", "weight"),
        ),
        "mlp": Case(
            function=MLP,
            operands={
                "x": x, "weight": random(INNER, K), "down": random(N, INNER), "bias": random(INNER),
            },
            call=lambda x, weight, down, bias: of(MLP)(
                *(x, weight, down, None, bias, None, None, Epilogue.backward_of("gelu"))
            ),
            exact=lambda x, weight, down, bias: functional.linear(
                functional.gelu(functional.linear(x, weight, bias)), down
            ),
            kept=rules(x="weight", weight="x weight", down="x weight bias down"),
            products=mlp_products,
        ),
        "grouped": Case(
            function=GroupedMm,
            operands={"a": x, "b": random(GROUPS, K, N), "ends": ends},
            call=of(GroupedMm),
            exact=multiplied_by_runs,
            kept=rules(a="b", b="a", ends="a b"),
            products=each("a", "b"),
        ),
        "experts": Case(
            function=Experts,
            operands=routed,
            call=of(Experts),
            exact=reference,
            kept=rules(
                tokens="gate_up", gate_up="tokens", down="tokens shares gate_up",
                shares="tokens shares gate_up down",
            ),
            products=experts_products,
        ),
        "experts with biases": Case(
            function=Experts,
            operands={**routed, "bias": random(GROUPS, 2 * INNER)},
            call=of(Experts, Gate(alpha=1.702, limit=1.0, offset=1.0, interleaved=True)),
            exact=functools.partial(reference, gate=clamped),
            kept=rules(
                tokens="gate_up", gate_up="tokens", down="tokens shares gate_up bias",
                shares=every, bias=every, index=every,
            ),
            products=experts_products,
        ),
        "norm": Case(
            function=RMSNorm,
            operands={"x": x, "weight": random(K)},
            call=of(RMSNorm, 1e-6),
            exact=lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-6),
            kept=rules(x="x weight", weight="x weight"),
            products=each(),
        ),
        "loss": Case(  # of each row, whose logits the backward pass computes again
            function=LinearCrossEntropy,
            operands={
                "x": x, "weight": weight, "bias": bias, "labels": torch.randint(N, (M,)),
            },
            call=of(LinearCrossEntropy, None, None, *LossOptions(reduction="none")),
            exact=lambda x, weight, bias, labels: functional.cross_entropy(
                functional.linear(x, weight, bias), labels, reduction="none"
            ),
            kept=lambda needs: frozenset({"x", "weight", "bias", "labels"}),
            products=lambda needs: 1 + each("x", "weight")(needs),
        ),
        "rotary": Case(
            function=Rotary,
            operands={"q": random(2, 3, M, K), "k": random(2, 1, M, K)},
            call=rotated,
            exact=rotated_by_torch,
            kept=rules(),
            products=each(),
        ),
    }  # fmt: skip


NAMES = tuple(cases())


def choices(case: Case) -> Iterator[Needs]:
    names = [name for name, one in case.operands.items() if one.is_floating_point()]
    for number in range(1, len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, number))


def run(case: Case, needs: Needs) -> tuple[torch.Tensor, dict[str, torch.Tensor], Needs]:
    """The result, the operands of the call, and the names of those it kept."""
    operands = {
        name: one.clone().requires_grad_(name in needs) for name, one in case.operands.items()
    }
    names = {one.data_ptr(): name for name, one in operands.items()}
    kept: set[str] = set()

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.add(names.get(one.data_ptr(), ""))
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        out = case.call(*operands.values())
    return out, operands, frozenset(kept - {""})


def test_every_function_is_here() -> None:
    ours = {
        one
        for one in torch.autograd.Function.__subclasses__()
        if one.__module__.startswith("gemmsmith.")
    }
    assert ours == {case.function for case in cases().values()}


@pytest.mark.parametrize("name", NAMES)
def test_products(engine: Engine, runs: Runs, name: str) -> None:
    case = cases()[name]
    for needs in choices(case):
        out, operands, _ = run(case, needs)
        runs()
        wanted = [operands[one] for one in sorted(needs)]
        gradients = torch.autograd.grad(out, wanted, torch.ones_like(out))
        assert [one.shape for one in gradients] == [one.shape for one in wanted]
        assert runs() == case.products(needs), needs


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept(engine: Engine, name: str) -> None:
    case = cases()[name]
    for needs in choices(case):
        assert run(case, needs)[2] == case.kept(needs), needs


def between(least: float, most: float, like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(least, most, like.numel()).view(like.shape).to(like.dtype)


def twice(
    compute: Callable[..., torch.Tensor], operands: dict[str, torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of the first and of the second order, for gradients that depend on the result."""
    out = compute(*operands.values())
    wanted = [one for one in operands.values() if one.requires_grad]
    some = between(0.5, 1.5, out).requires_grad_()
    first = torch.autograd.grad(out, wanted, some * out, create_graph=True)
    total = torch.stack([(one * between(-1, 2, one)).sum() for one in first]).sum()
    second = torch.autograd.grad(total, [*wanted, some], allow_unused=True)
    return [*(one.detach() for one in first), *second]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients_need_no_more(engine: Engine, name: str) -> None:
    case = cases()[name]
    for needs in choices(case):
        operands = {
            key: one.clone().requires_grad_(key in needs) for key, one in case.operands.items()
        }
        exact = {
            key: one.detach().double().requires_grad_(key in needs)
            if one.is_floating_point()
            else one
            for key, one in operands.items()
        }
        for mine, exactly in zip(twice(case.call, operands), twice(case.exact, exact), strict=True):
            assert (mine is None) == (exactly is None), needs
            if mine is not None and exactly is not None:
                assert (mine - exactly).norm() <= 0.04 * exactly.norm(), needs
