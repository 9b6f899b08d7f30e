"""`gemmsmith.experts` on the host: what it computes, whose products it runs, what it refuses.

The passes over memory are torch's here; tests/gpu/test_mixture.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.routing import route
from tests.support.mixtures import close, reference
from tests.support.stand_in import Chooser, Host

TOKENS, CHOSEN, EXPERTS, WIDTH, INNER = 37, 3, 5, 32, 16

Layer = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def index(of_others: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    rows = [torch.randperm(EXPERTS + of_others)[:CHOSEN] for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.empty(0, CHOSEN, dtype=torch.int64)


def layer(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16) -> Layer:
    """Tokens, shares, gate_up, down."""
    sizes = (tokens, WIDTH), (tokens, CHOSEN), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
    return tuple(torch.randn(size).to(dtype).requires_grad_() for size in sizes)


@pytest.mark.parametrize("of_others", [0, 3])
def test_the_layer_and_its_gradients(of_others: int) -> None:
    x, shares, gate_up, down = operands = layer()
    chosen, gradient = index(of_others), torch.randn(TOKENS, WIDTH)
    exact = [one.detach().double().requires_grad_() for one in operands]
    wanted = reference(exact[0], chosen, *exact[1:])
    found = gemmsmith.experts(x, chosen, shares, gate_up, down)
    assert found.dtype is torch.bfloat16
    close(found, wanted.detach())
    theirs = torch.autograd.grad(wanted, exact, gradient.double())
    ours = torch.autograd.grad(found, operands, gradient.bfloat16())
    for mine, exactly in zip(ours, theirs, strict=True):
        close(mine, exactly)


def test_the_same_bits_compiled_and_again() -> None:
    operands, chosen = layer(), index(2)
    gradient = torch.randn(TOKENS, WIDTH).bfloat16()

    def step(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = gemmsmith.experts(x, chosen, *weights)
        return out, *torch.autograd.grad(out, operands, gradient)

    once = step(*operands)
    compiled = torch.compile(gemmsmith.experts, fullgraph=True, backend="aot_eager")
    out = compiled(operands[0], chosen, *operands[1:])
    graph = out, *torch.autograd.grad(out, operands, gradient)
    for one, again, traced in zip(once, step(*operands), graph, strict=True):
        assert torch.equal(one, again)
        assert torch.equal(one, traced)


def test_its_six_products_are_grouped_ones_and_one_may_be_gated() -> None:
    operands, chosen = layer(), index()
    with gemmsmith.capture() as shapes:
        gemmsmith.experts(operands[0], chosen, *operands[1:]).sum().backward()
    found = {(p.m, p.n, p.k, p.batch, p.dtype) for p in shapes.problems}
    rows, two = TOKENS * CHOSEN, 2 * INNER
    by_rows, by_depth = "bf16.group_rows", "bf16.group_depth"
    assert found == {
        (rows, two, WIDTH, EXPERTS, by_rows),
        (rows, two, WIDTH, EXPERTS, f"{by_rows}.then_silu_gate_aux"),
        (rows, WIDTH, INNER, EXPERTS, by_rows),
        (rows, INNER, WIDTH, EXPERTS, by_rows),
        (rows, WIDTH, two, EXPERTS, by_rows),
        (WIDTH, INNER, rows, EXPERTS, by_depth),
        (two, WIDTH, rows, EXPERTS, by_depth),
    }


@pytest.fixture
def gated(engine: Engine, host: Host, chooser: Chooser) -> Chooser:
    """Kernels of the first product with its gate win, and no others."""
    host.kind = "cpu"
    chooser.answers = lambda problem: problem.operation.epilogue.is_gated
    return chooser


@pytest.mark.parametrize("of_others", [0, 3])
def test_one_kernel_opens_the_layer_where_it_wins(
    gated: Chooser, runs: Callable[[], int], of_others: int
) -> None:
    operands, chosen = layer(), index(of_others)
    exact = [one.detach().double().requires_grad_() for one in operands]
    wanted = reference(exact[0], chosen, *exact[1:])
    found = gemmsmith.experts(operands[0], chosen, *operands[1:])
    assert runs() == 1
    close(found, wanted.detach())
    gradient = torch.randn(TOKENS, WIDTH)
    theirs = torch.autograd.grad(wanted, exact, gradient.double())
    ours = torch.autograd.grad(found, operands, gradient.bfloat16())
    for mine, exactly in zip(ours, theirs, strict=True):
        close(mine, exactly)
    with torch.no_grad():
        close(gemmsmith.experts(operands[0], chosen, *operands[1:]), wanted.detach())
    assert runs() == 1
    asked = [one.dtype for one in gated.asked if one.operation.epilogue.is_gated]
    assert asked == ["bf16.group_rows.then_silu_gate_aux", "bf16.group_rows.then_silu_gate"]


@pytest.mark.parametrize(
    ("gated_us", "product_us", "expected"),
    [(10.0, 10.0, True), (10.0, 9.0, False), (10.0, None, False), (None, 10.0, False)],
)
def test_a_gated_kernel_is_run_where_it_beats_the_products_own_and_a_pass(
    gated: Chooser,
    runs: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    gated_us: float | None,
    product_us: float | None,
    expected: bool,
) -> None:
    gated.answers = lambda problem: problem.k == WIDTH
    gated.time_us = lambda problem: gated_us if problem.operation.is_fused else product_us
    passed: list[None] = []
    activate = passes.activate
    monkeypatch.setattr(passes, "activate", lambda *some: (passed.append(None), activate(*some))[1])
    operands, chosen = layer(), index()
    with torch.no_grad():
        found = gemmsmith.experts(operands[0], chosen, *operands[1:])
        exact = [one.double() for one in operands]
        close(found, reference(exact[0], chosen, *exact[1:]))
    assert runs() == 1
    assert bool(passed) is not expected


def test_a_compiled_layer_runs_it_as_well(gated: Chooser, runs: Callable[[], int]) -> None:
    operands, chosen = layer(), index()
    compiled = torch.compile(gemmsmith.experts, fullgraph=True, backend="aot_eager")
    gradient = torch.randn(TOKENS, WIDTH).bfloat16()

    def step(compute: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = compute(operands[0], chosen, *operands[1:])
        return out, *torch.autograd.grad(out, operands, gradient)

    step(compiled)  # which torch looks at for aliases, so that its products are run one by one
    assert runs() == 0
    for mine, exactly in zip(step(compiled), step(gemmsmith.experts), strict=True):
        assert torch.equal(mine, exactly)
    assert runs() == 2


def test_weights_of_another_order_are_opened_by_a_product_and_a_pass(
    gated: Chooser, runs: Callable[[], int]
) -> None:
    x, shares, gate_up, down = layer()
    chosen = index()
    turned = gate_up.detach().mT.contiguous().mT
    with torch.no_grad():
        found = gemmsmith.experts(x, chosen, shares, turned, down)
        wanted = reference(x.double(), chosen, *(one.double() for one in (shares, turned, down)))
    assert runs() == 0
    close(found, wanted)


@pytest.mark.parametrize("number", [5, 255, 256, 700])
def test_routing_sorts_slots_by_expert(number: int) -> None:
    chosen = torch.randint(number + 2, (50, 4))
    routing = route(chosen, number)
    of_row = chosen.flatten()[routing.slots].clamp(max=number)
    assert torch.equal(of_row, of_row.sort().values)
    assert torch.equal(routing.slots[routing.places].flatten(), torch.arange(200))
    ends = [int((of_row <= expert).sum()) for expert in range(number)]
    assert routing.ends.tolist() == ends
    assert routing.ends.dtype is torch.int32


def test_no_tokens() -> None:
    x, shares, gate_up, down = layer(tokens=0)
    out = gemmsmith.experts(x, index(tokens=0), shares, gate_up, down)
    assert out.shape == (0, WIDTH)


def test_what_does_not_go_together_is_named() -> None:
    x, shares, gate_up, down = layer()
    chosen = index()
    with pytest.raises(ValueError, match=r"gate_up must be \[5, 32, 32\]"):
        gemmsmith.experts(x, chosen, shares, gate_up[:, :-2], down)
    with pytest.raises(ValueError, match="one type"):
        gemmsmith.experts(x.float(), chosen, shares, gate_up, down)
    with pytest.raises(ValueError, match="36 rows for 37 tokens"):
        gemmsmith.experts(x, chosen[1:], shares[1:], gate_up, down)
    with pytest.raises(ValueError, match="takes hidden_states"):
        gemmsmith.experts(x[None], chosen, shares, gate_up, down)
