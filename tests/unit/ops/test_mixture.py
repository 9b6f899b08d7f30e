"""`gemmsmith.experts` on the host: what it computes, whose products it runs, what it refuses.

The passes over memory are torch's here; tests/gpu/test_mixture.py has the kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.grouped import aligned
from gemmsmith.ops.products.routing import route
from tests.support.mixtures import close, compared, reference
from tests.support.stand_in import Chooser, Host

TOKENS, CHOSEN, EXPERTS, WIDTH, INNER = 37, 3, 5, 32, 16

Layer = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def index(of_others: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    rows = [torch.randperm(EXPERTS + of_others)[:CHOSEN] for _ in range(tokens)]
    return torch.stack(rows) if rows else torch.empty(0, CHOSEN, dtype=torch.int64)


def layer(tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16, inner: int = INNER) -> Layer:
    """Tokens, shares, gate_up, down."""
    sizes = (tokens, WIDTH), (tokens, CHOSEN), (EXPERTS, 2 * inner, WIDTH), (EXPERTS, WIDTH, inner)
    return tuple(torch.randn(size).to(dtype).requires_grad_() for size in sizes)


@pytest.mark.parametrize("of_others", [0, 3])
def test_the_layer_and_its_gradients(of_others: int) -> None:
    for found, exactly in compared(gemmsmith.experts, layer(), index(of_others)):
        assert found.dtype is torch.bfloat16
        close(found, exactly)


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


def test_its_six_products_are_grouped_ones_and_two_may_be_gated() -> None:
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
        (rows, INNER, WIDTH, EXPERTS, f"{by_rows}.then_dsilu_gate_act"),
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
    (_, exact), *_ = results = list(compared(gemmsmith.experts, operands, chosen))
    for found, exactly in results:
        close(found, exactly)
    assert runs() == 1  # forwards: no kernel of the backward pass has won
    with torch.no_grad():
        close(gemmsmith.experts(operands[0], chosen, *operands[1:]), exact)
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


@pytest.fixture
def backward(engine: Engine, host: Host, chooser: Chooser) -> Chooser:
    """Kernels of the gradient of gate and up win, and no others."""
    host.kind = "cpu"
    chooser.answers = lambda problem: problem.operation.epilogue.backward is not None
    return chooser


@pytest.mark.parametrize("inner", [16, 136])
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4))[1:], ids=str)
def test_one_kernel_differentiates_gates_where_it_wins(
    backward: Chooser, runs: Callable[[], int], needs: tuple[bool, ...], inner: int
) -> None:
    operands = layer(inner=inner)
    with torch.no_grad():
        operands[1][3] = 0.0  # nothing may be divided by a share
    operands = tuple(one.requires_grad_(need) for one, need in zip(operands, needs, strict=True))
    for mine, exactly in compared(gemmsmith.experts, operands, index(3)):
        close(mine, exactly)
    opens = needs[0] or needs[2]
    assert runs() == opens
    used = [one for one in backward.asked if one.operation.epilogue.backward]
    act = "_act" if needs[3] else ""
    assert [one.dtype for one in used] == [f"bf16.group_rows.then_dsilu_gate{act}"] * opens


def test_operands_that_no_backward_kernel_takes_are_torchs(
    backward: Chooser, runs: Callable[[], int]
) -> None:
    x, shares, gate_up, down = layer()
    base = torch.randn(down.numel() + 1).bfloat16()
    operands = (x, shares, gate_up, base[1:].view(down.shape).detach().requires_grad_())
    for mine, exactly in compared(gemmsmith.experts, operands, index(3)):
        close(mine, exactly)
    assert runs() == 0
    assert backward.asked


@pytest.mark.parametrize(
    ("fused_us", "product_us", "expected"), [(10.0, 10.0, True), (10.0, 9.0, False)]
)
def test_a_backward_kernel_is_run_where_it_beats_the_products_own_and_a_pass(
    backward: Chooser,
    runs: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    fused_us: float,
    product_us: float,
    expected: bool,
) -> None:
    backward.answers = lambda problem: problem.k == WIDTH and problem.n == INNER
    backward.time_us = lambda problem: fused_us if problem.operation.is_fused else product_us
    passed: list[None] = []
    whole = passes.activate_backward
    monkeypatch.setattr(
        passes, "activate_backward", lambda *some: (passed.append(None), whole(*some))[1]
    )
    for mine, exactly in compared(gemmsmith.experts, layer(), index()):
        close(mine, exactly)
    assert runs() == 1
    assert bool(passed) is not expected


def test_a_compiled_layer_runs_it_as_well(gated: Chooser, runs: Callable[[], int]) -> None:
    gated.answers = lambda problem: problem.operation.is_fused
    operands, chosen = layer(), index()
    compiled = torch.compile(gemmsmith.experts, fullgraph=True, backend="aot_eager")
    gradient = torch.randn(TOKENS, WIDTH).bfloat16()

    def step(compute: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = compute(operands[0], chosen, *operands[1:])
        return out, *torch.autograd.grad(out, operands, gradient)

    step(compiled)  # which torch looks at for aliases, so that its products are run one by one
    assert runs() == 1  # that of the backward pass
    for mine, exactly in zip(step(compiled), step(gemmsmith.experts), strict=True):
        assert torch.equal(mine, exactly)
    assert runs() == 4


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


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_numbers_of_any_integer_type(kind: torch.dtype) -> None:
    chosen = torch.randint(120, (50, 4))
    for number in (100, 256, 300):
        for mine, exactly in zip(
            route(chosen.to(kind), number), route(chosen, number), strict=True
        ):
            assert torch.equal(mine, exactly)


def test_numbers_of_no_expert_here_are_of_other_ranks() -> None:
    chosen = torch.tensor([[0, -1], [4, 5], [2**40, 2]])
    alike = torch.tensor([[0, 5], [4, 5], [5, 2]])
    for mine, exactly in zip(route(chosen, 5), route(alike, 5), strict=True):
        assert torch.equal(mine, exactly)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    operands, chosen = layer(tokens), index(tokens=tokens)
    for found, exactly in compared(gemmsmith.experts, operands, chosen):
        assert found.shape == exactly.shape
        close(found, exactly)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiled_with_another_number_of_tokens_at_each_step(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        gemmsmith.experts, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for tokens in (6, 9, 1, 0, 33, 6):
        operands, chosen = layer(tokens), index(2, tokens)
        gradient = torch.randn(tokens, WIDTH).bfloat16()
        steps = []
        for compute in (compiled, gemmsmith.experts):
            out = compute(operands[0], chosen, *operands[1:])
            steps.append([out, *torch.autograd.grad(out, operands, gradient)])
        for mine, exactly in zip(*steps, strict=True):
            assert torch.equal(mine, exactly)
            assert mine.stride() == exactly.stride()


def test_operands_that_lie_in_memory_in_other_ways(engine: Engine, host: Host) -> None:
    host.kind = "cpu"
    x, shares, gate_up, down = (one.detach() for one in layer())
    chosen, more = index(), torch.rand(TOKENS, 2 * CHOSEN).argsort()[:, :EXPERTS]
    wide = torch.randn(TOKENS, WIDTH + 3).bfloat16()
    base = torch.randn(gate_up.numel() + 1).bfloat16()
    longer = torch.randn(EXPERTS, WIDTH, INNER + 3).bfloat16()
    apart = (2 * INNER * WIDTH + 1, WIDTH, 1)
    cases: dict[str, tuple[torch.Tensor, ...]] = {
        "numbers cut from more": (x, more[:, :CHOSEN].clamp(max=EXPERTS), shares, gate_up, down),
        "numbers in columns": (x, chosen.t().contiguous().t(), shares, gate_up, down),
        "shares in columns": (x, chosen, shares.t().contiguous().t(), gate_up, down),
        "one share": (x, chosen, shares[:1, :1].expand(TOKENS, CHOSEN), gate_up, down),
        "FP32 shares": (x, chosen, shares.float(), gate_up, down),
        "tokens cut from wider rows": (wide[:, :WIDTH], chosen, shares, gate_up, down),
        "tokens in columns": (x.t().contiguous().t(), chosen, shares, gate_up, down),
        "one token": (x[:1].expand(TOKENS, WIDTH), chosen, shares, gate_up, down),
        "weights turned": (
            x, chosen, shares, gate_up.mT.contiguous().mT, down.mT.contiguous().mT,
        ),
        "weights not on 16 bytes": (x, chosen, shares, base[1:].view(gate_up.shape), down),
        "rows of weights not on 16 bytes": (
            x, chosen, shares, gate_up, longer[..., :INNER],
        ),
        "experts not on 16 bytes": (
            x, chosen, shares, base.as_strided((4, 2 * INNER, WIDTH), apart), down[:4],
        ),
        "one expert's weights": (
            x, chosen, shares, gate_up[:1].expand(gate_up.shape), down[:, :1].expand(down.shape),
        ),
        "every second expert": (x, chosen // 2, shares, gate_up[::2], down[::2]),
    }  # fmt: skip
    for name, (tokens, numbers, parts, first, second) in cases.items():
        operands = tuple(one.detach().requires_grad_() for one in (tokens, parts, first, second))
        for found, exactly in compared(gemmsmith.experts, operands, numbers):
            assert found.shape == exactly.shape, name
            close(found, exactly)


def test_what_does_not_go_together_is_named() -> None:
    x, shares, gate_up, down = layer()
    chosen = index()
    wide = [one.double() for one in (x, gate_up, down)]
    for message, operands in (
        (r"gate_up must be \[5, 32, 32\]", (x, chosen, shares, gate_up[:, :-2], down)),
        ("one type", (x.float(), chosen, shares, gate_up, down)),
        ("36 rows for 37 tokens", (x, chosen[1:], shares[1:], gate_up, down)),
        ("takes hidden_states", (x[None], chosen, shares, gate_up, down)),
        ("at least one expert", (x, chosen, shares, gate_up[:0], down[:0])),
        (r"top_k_weights must be floats, not torch\.int64", (x, chosen, chosen, gate_up, down)),
        (r"top_k_index must be integers, not torch\.bfloat16", (x, shares, shares, gate_up, down)),
        ("one device, not on cpu, meta, cpu", (x, chosen.to("meta"), shares, gate_up, down)),
        (r"16 or 32 bit floats, not torch\.float64", (wide[0], chosen, shares, *wide[1:])),
    ):
        with pytest.raises(ValueError, match=message):
            gemmsmith.experts(*operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_widths_are_named(dtype: torch.dtype) -> None:
    """Rows that do not begin on 16 bytes are for no grouped product, torch's or ours."""
    step = 16 // dtype.itemsize
    chosen = index()

    def run(width: int, inner: int) -> None:
        sizes = (TOKENS, width), (TOKENS, CHOSEN), (EXPERTS, 2 * inner, width)
        given = [torch.randn(size).to(dtype) for size in (*sizes, (EXPERTS, width, inner))]
        gemmsmith.experts(given[0], chosen, *given[1:])

    for odd in range(1, step):
        with pytest.raises(ValueError, match=f"width is {step + odd} and must be a multiple"):
            run(step + odd, step)
        with pytest.raises(ValueError, match=f"inner is {step + odd} and must be a multiple"):
            run(step, step + odd)
    run(step, 3 * step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_off_16_bytes_are_copied(dtype: torch.dtype) -> None:
    size = (3, 8, 16)
    base = torch.randn(math.prod(size) + 1).to(dtype)
    for weight, is_copied in (
        (base[:-1].view(size), False),
        (base[:-1].view(size).mT, False),
        (base[1:].view(size), True),
        (base[1:].view(size).mT, True),
        (base[:-1].view(size)[..., ::2], True),
        (base[:128].view(1, 8, 16).expand(size), True),
    ):
        made = aligned(weight)
        assert torch.equal(made, weight)
        assert (made.data_ptr() != weight.data_ptr()) is is_copied
        assert made.data_ptr() % 16 == 0
