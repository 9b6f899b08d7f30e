"""`gemmsmith.experts` on a GPU: its passes as kernels, the layer, graphs, and its time beside
transformers' own. Without a GPU: tests/unit/ops/test_mixture.py.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.ops.engine import by_triton
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.routing import route
from tests.gpu.support.layers import warm_up
from tests.support.mixtures import close, compared, reference

TYPES = [torch.bfloat16, torch.float16]
CASES = 30


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def chosen_of(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(chosen).indices


def alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for one rounding."""
    step = 2**-7 if found.dtype is torch.bfloat16 else 2**-10
    torch.testing.assert_close(found.cpu(), wanted, rtol=step, atol=1e-5)


GATES = [
    passes.Gate(),
    passes.Gate(alpha=1.702, limit=1.0, offset=1.0, interleaved=True),  # gpt-oss, but for its limit
    passes.Gate(limit=0.5),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("width", "inner"), [(2048, 768), (2880, 2880), (40, 24)])
def test_each_pass_is_what_torch_says(
    width: int, inner: int, dtype: torch.dtype, gate: passes.Gate, biased: bool
) -> None:
    tokens, experts, chosen = 333, 16, 4
    index = chosen_of(tokens, experts + 3, chosen)
    routing = route(index, experts)
    used, rows = int(routing.used), tokens * chosen
    x, out = torch.randn(tokens, width).to(dtype), torch.randn(rows, width).to(dtype)
    opened, gradient = torch.randn(rows, 2 * inner).to(dtype), torch.randn(rows, inner).to(dtype)
    shares = torch.rand(tokens, chosen)
    for each in (out, opened, gradient):
        each[used:] = torch.nan  # as memory may be that no product has written
    on_gpu = [one.cuda() for one in routing]
    slots, places, last = on_gpu[0], on_gpu[1], on_gpu[2][-1:]
    alike(passes.scatter(x.cuda(), places), passes.scatter(x, routing.places))
    found_rows, found_shares = passes.scatter_with_shares(x.cuda(), shares.cuda(), places)
    alike(found_rows, passes.scatter(x, routing.places))
    assert torch.equal(found_shares.cpu(), shares.flatten()[routing.slots])
    found = passes.gather_sum(out.cuda(), places, last)
    alike(found, passes.gather_sum(out, routing.places, routing.used))
    given = (opened, shares, routing.slots, routing.used)
    given_gpu = (opened.cuda(), shares.cuda(), slots, last)
    opening = opening_gpu = passes.Opening(gate)
    if biased:
        bias = torch.randn(experts, 2 * inner).to(dtype)
        opening = passes.Opening(gate, bias, index)
        opening_gpu = passes.Opening(gate, bias.cuda(), index.cuda())
    found = passes.activate(*given_gpu, opening_gpu)
    alike(found[:used], passes.activate(*given, opening)[:used])
    for needs in itertools.product((False, True), repeat=3):
        made = passes.activate_backward(*given_gpu, gradient.cuda(), needs, opening_gpu)
        wanted = passes.activate_backward(*given, gradient, needs, opening)
        assert tuple(one is not None for one in made) == needs
        for at, (mine, exactly) in enumerate(zip(made, wanted, strict=True)):
            if mine is None or exactly is None:
                continue
            if at == 1:
                torch.testing.assert_close(mine.cpu(), exactly, rtol=1e-4, atol=1e-4)
            else:
                alike(mine[:used], exactly[:used])


ROUTINGS = [(1, 1, 1), (50, 4, 5), (333, 3, 100), (2048, 8, 128), (16384, 8, 128), (8192, 8, 256)]


@pytest.mark.parametrize(("tokens", "chosen", "experts"), ROUTINGS)
@pytest.mark.parametrize("others", [0, 7])
def test_routing_is_what_torch_says(tokens: int, chosen: int, experts: int, others: int) -> None:
    some = torch.randint(experts + others, (tokens, chosen))
    skewed = (some.float() / (experts + others)).pow(3).mul(experts + others).long()
    alone = torch.full_like(some, experts - 1)
    none_here = torch.full_like(some, experts + others)
    negative = some.where(some % 7 != 3, -1)
    columns = some.t().contiguous().t()
    for index in (some, skewed, alone, none_here, negative, columns, some.int(), some.short()):
        found = route(index.cuda(), experts)
        for mine, exactly in zip(found, route(index, experts), strict=True):
            assert mine.dtype is exactly.dtype
            assert torch.equal(mine.cpu(), exactly)


def test_a_pass_of_a_tensor_that_is_not_aligned() -> None:
    tokens, width, chosen = 64, 256, 2
    places = torch.randperm(tokens * chosen).view(tokens, chosen)
    whole = torch.randn(tokens * width + 1).bfloat16()
    for at in (0, 1, 0, 1):  # what was compiled for one is not launched for the other
        x = whole[at : at + tokens * width].view(tokens, width)
        of_gpu = whole.cuda()[at : at + tokens * width].view(tokens, width)
        alike(passes.scatter(of_gpu, places.cuda()), passes.scatter(x, places))


def test_a_profilers_hooks_see_every_launch() -> None:
    triton = pytest.importorskip("triton")
    x, places = (
        torch.randn(8, 64, device="cuda").bfloat16(),
        torch.arange(8, device="cuda")[:, None],
    )
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    passes.scatter(x, places)
    hook.add(seen.append)
    try:
        passes.scatter(x, places)
        passes.scatter(x, places)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 2
    passes.scatter(x, places)
    assert len(seen) == 2


def layer(tokens: int, chosen: int, experts: int, width: int, inner: int) -> list[torch.Tensor]:
    sizes = (tokens, width), (tokens, chosen), (experts, 2 * inner, width), (experts, width, inner)
    scales = 1.0, 1.0 / chosen, width**-0.5, inner**-0.5
    return [
        (torch.randn(size, device="cuda") * scale).bfloat16().requires_grad_()
        for size, scale in zip(sizes, scales, strict=True)
    ]


def test_random_layers_and_their_gradients() -> None:
    chance = random.Random(20261123)
    for _ in range(CASES):
        chosen = chance.choice((1, 2, 8))
        experts = chance.choice((8, 16, 64))
        tokens = chance.choice((1, 7, 128, 1000))
        width, inner = 16 * chance.randint(1, 40), 16 * chance.randint(1, 40)
        operands = layer(tokens, chosen, experts, width, inner)
        others = chance.choice((0, 4))
        index = chosen_of(tokens, experts + others, chosen).cuda()
        for mine, exactly in compared(gemmsmith.experts, operands, index):
            close(mine, exactly)


def on_gpu(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    return chosen_of(tokens, experts, chosen).cuda()


EDGES = [
    (0, 4, 2), (1, 4, 2), (1, 1, 1), (300, 1, 1), (257, 255, 8), (257, 256, 8), (257, 257, 8),
    (513, 300, 6), (33000, 16, 8),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "experts", "chosen"), EDGES)
def test_few_tokens_and_many_experts(tokens: int, experts: int, chosen: int) -> None:
    operands = layer(tokens, chosen, experts, 128, 64)
    for mine, exactly in compared(gemmsmith.experts, operands, on_gpu(tokens, experts, chosen)):
        assert mine.shape == exactly.shape
        close(mine, exactly)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4))[1:], ids=str)
def test_the_gradients_that_are_needed(needs: tuple[bool, ...]) -> None:
    operands = [
        one.detach().requires_grad_(need)
        for one, need in zip(layer(300, 4, 16, 256, 128), needs, strict=True)
    ]
    for mine, exactly in compared(gemmsmith.experts, operands, on_gpu(300, 18, 4)):
        close(mine, exactly)


def test_operands_that_lie_in_memory_in_other_ways() -> None:
    tokens, chosen, experts, width, inner = 512, 4, 16, 256, 128
    x, shares, gate_up, down = (
        one.detach() for one in layer(tokens, chosen, experts, width, inner)
    )
    index, more = on_gpu(tokens, experts, chosen), on_gpu(tokens, experts, 2 * chosen)
    wide, longer = torch.randn(tokens, 600).cuda().bfloat16(), torch.randn_like(x.repeat(2, 1))
    base = torch.randn(gate_up.numel() + 1).cuda().bfloat16()
    narrow = torch.randn(experts, width, inner + 3).cuda().bfloat16()[..., :inner]
    cases: dict[str, tuple[torch.Tensor, ...]] = {
        "int32 numbers": (x, index.int(), shares, gate_up, down),
        "uint8 numbers": (x, index.to(torch.uint8), shares, gate_up, down),
        "numbers cut from more": (x, more[:, :chosen], shares, gate_up, down),
        "numbers in columns": (x, index.t().contiguous().t(), shares, gate_up, down),
        "an expert twice": (x, index[:, :1].expand(tokens, chosen), shares, gate_up, down),
        "all of other ranks": (x, torch.full_like(index, experts), shares, gate_up, down),
        "FP32 shares": (x, index, shares.float(), gate_up, down),
        "shares in columns": (x, index, shares.t().contiguous().t(), gate_up, down),
        "negated shares": (x, index, torch._neg_view(shares), gate_up, down),
        "tokens cut from wider rows": (wide[:, :width], index, shares, gate_up, down),
        "tokens not on 16 bytes": (wide[:, 1 : 1 + width], index, shares, gate_up, down),
        "every second token": (longer[::2], index, shares, gate_up, down),
        "tokens in columns": (x.t().contiguous().t(), index, shares, gate_up, down),
        "one token": (x[:1].expand(tokens, width), index, shares, gate_up, down),
        "negated tokens": (torch._neg_view(x), index, shares, gate_up, down),
        "weights turned": (
            x, index, shares, gate_up.mT.contiguous().mT, down.mT.contiguous().mT,
        ),
        "weights not on 16 bytes": (x, index, shares, base[1:].view(gate_up.shape), down),
        "rows of weights not on 16 bytes": (x, index, shares, gate_up, narrow),
        "negated weights": (x, index, shares, torch._neg_view(gate_up), down),
        "one expert's weights": (
            x, index, shares, gate_up[:1].expand(gate_up.shape), down[:, :1].expand(down.shape),
        ),
    }  # fmt: skip
    for name, (first, numbers, *others) in cases.items():
        leaves = [one.detach().requires_grad_() for one in (first, *others)]
        for mine, exactly in compared(gemmsmith.experts, leaves, numbers):
            assert mine.shape == exactly.shape, name
            close(mine, exactly)


def test_what_is_no_number_stays_with_its_tokens() -> None:
    """And memory that holds such values is never read."""
    tokens, experts = 300, 8
    operands = layer(tokens, 2, experts, 256, 128)
    with torch.no_grad():
        operands[0][7], operands[0][11, 3] = torch.nan, torch.inf
    index = on_gpu(tokens, experts, 2)
    index[20:40] = experts  # of other ranks
    junk = [torch.full((2**22,), torch.nan, device="cuda").bfloat16() for _ in range(8)]
    del junk
    for mine, exactly in compared(gemmsmith.experts, operands, index):
        finite = exactly.isfinite()
        assert torch.equal(mine.isfinite(), finite)
        close(mine.where(finite, 0), exactly.where(finite, 0))


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiled_with_another_number_of_tokens_at_each_step(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *operands: gemmsmith.experts(*operands), dynamic=dynamic, fullgraph=True
    )
    for tokens in (64, 100, 1, 333, 64):
        operands, index = layer(tokens, 2, 8, 256, 128), on_gpu(tokens, 8, 2)
        for mine, exactly in compared(compiled, operands, index):
            close(mine, exactly)


def test_gradients_of_gradients() -> None:
    tokens, experts = 64, 8
    operands, index = layer(tokens, 2, experts, 256, 128), on_gpu(tokens, experts + 2, 2)
    pushes = [torch.randn_like(one) for one in (operands[0], *operands)]

    def twice(compute: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [one.detach().to(dtype).requires_grad_() for one in operands]
        gradient, *of = (one.to(dtype) for one in pushes)
        gradient.requires_grad_()
        out = compute(leaves[0], index, *leaves[1:])
        first = torch.autograd.grad(out, leaves, gradient, create_graph=True)
        total = torch.stack(
            [(one * push).double().sum() for one, push in zip(first, of, strict=True)]
        ).sum()
        second = torch.autograd.grad(total, [*leaves, gradient])
        return [*(one.detach() for one in first), *second]

    ours, exact = twice(gemmsmith.experts, torch.bfloat16), twice(reference, torch.float64)
    for mine, exactly in zip(ours, exact, strict=True):
        difference = torch.linalg.vector_norm(mine.double() - exactly)
        assert difference <= 4e-2 * torch.linalg.vector_norm(exactly)


def test_threads_with_a_stream_each() -> None:
    """Operands are written late on each stream: a kernel on another one would read NaN."""
    operands, index = layer(512, 4, 16, 256, 128), on_gpu(512, 16, 4)
    gradient = torch.randn_like(operands[0])

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(), *operands[1:]]
        out = gemmsmith.experts(leaves[0], index, *leaves[1:])
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    expected, wrong = step(operands[0]), []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            for _ in range(4):
                x = torch.full_like(operands[0], torch.nan)
                torch.cuda._sleep(20_000_000)
                with torch.no_grad():
                    x.copy_(operands[0])
                pairs = list(zip(step(x), expected, strict=True))
                stream.synchronize()
                wrong.extend(one for one, other in pairs if not torch.equal(one, other))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_a_graph_that_is_captured_before_a_kernel_was_compiled() -> None:
    tokens, chosen, experts = 96, 3, 12
    operands, index = layer(tokens, chosen, experts, 1040, 528), on_gpu(tokens, experts, chosen)
    gradient = torch.randn_like(operands[0])

    def step(compute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = compute(operands[0], index, *operands[1:])
        return [out, *torch.autograd.grad(out, operands, gradient)]

    with pytest.MonkeyPatch.context() as patch:  # torch's kernels are loaded
        patch.setattr(by_triton, "_imported", lambda name: None)
        step(gemmsmith.experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(gemmsmith.experts)
    graph.replay()
    for mine, exactly in zip(captured, step(gemmsmith.experts), strict=True):
        close(mine, exactly.double())


def test_a_graph_is_replayed_with_another_choice() -> None:
    tokens, chosen, experts, width, inner = 256, 4, 16, 512, 256
    operands = layer(tokens, chosen, experts, width, inner)
    index = chosen_of(tokens, experts, chosen).cuda()
    gradient = torch.randn(tokens, width, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        out = gemmsmith.experts(operands[0], index, *operands[1:])
        return out, *torch.autograd.grad(out, operands, gradient)

    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        index.copy_(chosen_of(tokens, experts, chosen))
        graph.replay()
        for one, again in zip(captured, step(), strict=True):
            assert torch.equal(one, again)
