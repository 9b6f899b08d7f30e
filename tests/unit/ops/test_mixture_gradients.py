"""Gradients of `gemmsmith.experts`: those that are needed, of any order, and under transforms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.routing import route
from tests.support.mixtures import close, compared, reference
from tests.support.stand_in import Host
from tests.unit.ops.test_mixture import CHOSEN, EXPERTS, INNER, TOKENS, Layer, index, layer

torch._dynamo.config.recompile_limit = 64

CHOICES = [one for one in itertools.product((False, True), repeat=4) if any(one)]
"""Which of tokens, shares, gate_up and down want a gradient."""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needs", CHOICES, ids=str)
def test_the_gradients_that_are_needed(needs: tuple[bool, ...], compiled: bool) -> None:
    operands = tuple(one.requires_grad_(need) for one, need in zip(layer(), needs, strict=True))
    compute = gemmsmith.experts
    if compiled:
        torch._dynamo.reset()
        compute = torch.compile(compute, fullgraph=True, dynamic=True, backend="aot_eager")
    for found, exactly in compared(compute, operands, index(2)):
        close(found, exactly)


GATES = (
    passes.Gate(),
    passes.Gate(alpha=1.702, limit=1.0, offset=1.0, interleaved=True),
    passes.Gate(limit=0.5),
)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_the_gradients_of_a_gate_are_those_of_its_value(gate: passes.Gate, biased: bool) -> None:
    """In FP32, where torch differentiates what `activate` computes."""
    chosen = index(3)
    routing = route(chosen, EXPERTS)
    bias = torch.randn(EXPERTS, 2 * INNER) if biased else None
    opening = passes.Opening(gate, bias, chosen if biased else None)
    opened = torch.randn(TOKENS * CHOSEN, 2 * INNER).requires_grad_()
    shares = torch.rand(TOKENS, CHOSEN).requires_grad_()
    read = (opened, shares, routing.slots, routing.used)
    value = passes.activate(*read, opening)
    gradient = torch.randn_like(value)
    used = int(routing.used)
    leaves = (opened, shares)
    of_opened, of_shares = torch.autograd.grad(value[:used], leaves, gradient[:used])
    with torch.no_grad():
        gradients = passes.activate_backward(*read, gradient, (True, True, True), opening)
    assert gradients.gate_up is not None
    torch.testing.assert_close(gradients.gate_up[:used], of_opened[:used], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients.shares, of_shares, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients.again, value, rtol=0, atol=0)
    assert passes.Opening(gate, bias).is_swiglu is (gate == passes.Gate() and not biased)


def derived(compute: Callable[..., torch.Tensor], operands: Layer) -> list[torch.Tensor | None]:
    """Gradients of the first, second and third order of all operands that want one."""
    leaves = [one for one in operands if one.requires_grad]
    found: list[torch.Tensor | None] = []
    values: Any = [compute(*operands)]
    for _ in range(3):
        known = [one for one in values if one is not None and one.requires_grad]
        if not known:
            break
        total = torch.stack([one.sin().mul(one.cos().detach() + 2).sum() for one in known]).sum()
        values = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        found += [None if one is None else one.detach() for one in values]
    return found


@pytest.mark.parametrize("needs", CHOICES, ids=str)
def test_gradients_of_gradients(needs: tuple[bool, ...]) -> None:
    """In FP32, so that nothing but the order of sums differs."""
    chosen = index(2)
    operands = tuple(
        (one.detach() / 4).requires_grad_(need)
        for one, need in zip(layer(dtype=torch.float32), needs, strict=True)
    )
    found = derived(lambda x, *weights: gemmsmith.experts(x, chosen, *weights), operands)
    exact = derived(lambda x, *weights: reference(x, chosen, *weights), operands)
    for mine, exactly in zip(found, exact, strict=True):
        if mine is None or exactly is None:
            assert not any(one is not None and one.any() for one in (mine, exactly))
        else:
            torch.testing.assert_close(
                mine, exactly, rtol=1e-3, atol=1e-4 * float(exactly.abs().max() + 1)
            )


def test_what_is_no_experts_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no product writes may hold anything, in gradients of gradients too."""
    product = torch._grouped_mm

    def poisoned(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return Poisoned.apply(a, b, offs)  # type: ignore[no-untyped-call, no-any-return]

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b, offs)
            out = product(a, b, offs=offs)
            if b.dim() == 3:
                out[offs[-1] :] = torch.nan
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            a, b, offs = ctx.saved_tensors
            dy = gradients[0].contiguous()
            if b.dim() == 3:
                return poisoned(dy, b.mT, offs), poisoned(a.mT, dy, offs), None
            return poisoned(b, dy.mT, offs).mT, poisoned(a.mT, dy, offs), None

    monkeypatch.setattr(torch, "_grouped_mm", poisoned)
    chosen = torch.tensor([[0, EXPERTS], [EXPERTS, 1], [EXPERTS, EXPERTS]])
    operands = layer(3, dtype=torch.float32)
    operands = operands[0], operands[1].detach()[:, :2].clone().requires_grad_(), *operands[2:]
    for one in derived(lambda x, *weights: gemmsmith.experts(x, chosen, *weights), operands):
        assert one is not None
        assert bool(one.isfinite().all())


# Transforms, in FP32 and beside experts that are no layer of ours


def narrow() -> tuple[torch.Tensor, Layer]:
    chosen = index(2, 4)
    return chosen, tuple(one.detach() / 4 for one in layer(4, torch.float32))


def every(chosen: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Each expert for each token, which every transform knows."""
    x, shares, gate_up, down = operands
    found = torch.zeros_like(x)
    for expert in range(EXPERTS):
        share = (shares * (chosen == expert)).sum(-1, keepdim=True)
        gate, up = (x @ gate_up[expert].T).chunk(2, -1)
        found = found + (functional.silu(gate) * up * share) @ down[expert].T
    return found


Function = Callable[..., torch.Tensor]


def ones(operands: Layer) -> Layer:
    return tuple(torch.ones_like(one) for one in operands)


def dual(of: Function, operands: Layer) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(one, torch.ones_like(one)) for one in operands]
        return forward_ad.unpack_dual(of(*duals)).tangent


def forward_over_reverse(of: Function, operands: Layer) -> Any:
    with forward_ad.dual_level():
        leaves = [
            forward_ad.make_dual(one.clone().requires_grad_(), torch.ones_like(one))
            for one in operands
        ]
        first = torch.autograd.grad(of(*leaves).sin().sum(), leaves, create_graph=True)
        return [forward_ad.unpack_dual(one).tangent for one in first]


def batched(of: Function, operands: Layer) -> Any:
    leaves = [one.clone().requires_grad_() for one in operands]
    out = of(*leaves)
    directions = torch.stack([torch.ones_like(out), out.detach()])
    return torch.autograd.grad(out, leaves, directions, is_grads_batched=True)


def of_negated(of: Function, operands: Layer) -> Any:
    leaves = [torch._neg_view(one).requires_grad_() for one in operands]
    out = of(*leaves)
    return out, torch.autograd.grad(out, leaves, torch._neg_view(torch.ones_like(out)))


def per_sample(of: Function, operands: Layer) -> Any:
    x, *weights = operands
    tokens = torch.stack([x, 2 * x])
    call = grad(lambda *given: of(*given).sin().sum(), argnums=(2, 3))
    return vmap(call, in_dims=(0, None, None, None))(tokens, *weights)


def ensemble(of: Function, operands: Layer) -> Any:
    x, shares, gate_up, down = operands
    return vmap(of, in_dims=(None, None, 0, None))(
        x, shares, torch.stack([gate_up, -gate_up]), down
    )


def of_shares(transform: Callable[..., Any]) -> Callable[[Function, Layer], Any]:
    def call(of: Function, operands: Layer) -> Any:
        x, shares, *weights = operands
        return transform(lambda one: of(x, one, *weights).sin().sum(0))(shares)

    return call


TRANSFORMS: dict[str, Callable[[Function, Layer], Any]] = {
    "dual": dual,
    "forward over reverse": forward_over_reverse,
    "jvp": lambda of, operands: jvp(of, operands, ones(operands)),
    "vjp": lambda of, operands: vjp(of, *operands)[1](torch.ones_like(operands[0])),
    "grad": lambda of, operands: grad(lambda *some: of(*some).sin().sum(), (0, 1, 2, 3))(*operands),
    "vmap": lambda of, operands: vmap(of, (0, 0, None, None))(
        *(torch.stack([one, 2 * one]) for one in operands[:2]), *operands[2:]
    ),
    "ensemble": ensemble,
    "per sample": per_sample,
    "jacrev": of_shares(jacrev),
    "jacfwd": of_shares(jacfwd),
    "hessian": of_shares(hessian),
    "batched": batched,
    "negated": of_negated,
    "jacobian": lambda of, operands: torch.autograd.functional.jacobian(
        lambda x, shares: of(x, shares, *operands[2:]).sum(0), operands[:2], vectorize=True
    ),
    "hvp": lambda of, operands: torch.autograd.functional.hvp(
        lambda x: of(x, *operands[1:]).sin().sum(), operands[0], torch.ones_like(operands[0])
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform: str) -> None:
    chosen, operands = narrow()
    results = [
        torch.utils._pytree.tree_leaves(
            TRANSFORMS[transform](lambda x, *rest, of=of: of(x, chosen, *rest), operands)
        )
        for of in (gemmsmith.experts, lambda x, choice, *rest: every(choice, x, *rest))
    ]
    for mine, exactly in zip(*results, strict=True):
        bound = 1e-5 * float(exactly.abs().max())
        torch.testing.assert_close(mine, exactly, rtol=1e-4, atol=bound)


def test_batches_of_gradients_where_kernels_have_won(
    engine: Engine, host: Host, runs: Callable[[], int]
) -> None:
    """In bf16, for which there are kernels, and without a patch of torch's product."""
    host.kind = "cpu"
    operands, chosen = layer(), index(2)
    rows = operands[0].detach()[:12]
    out = gemmsmith.grouped_mm(rows, operands[2].mT, route(chosen[:4], EXPERTS).ends)
    runs()
    directions = torch.randn(3, *out.shape).bfloat16()
    batch = torch.autograd.grad(
        out, operands[2], directions, retain_graph=True, is_grads_batched=True
    )
    assert runs() == 0
    for at, direction in enumerate(directions):
        (alone,) = torch.autograd.grad(out, operands[2], direction, retain_graph=True)
        torch.testing.assert_close(batch[0][at], alone, rtol=2e-2, atol=2e-2)
    assert runs() == len(directions)
