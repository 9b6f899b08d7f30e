"""`gemmsmith.experts` on a GPU: its passes as kernels, the layer, graphs, and its time beside
transformers' own. Without a GPU: tests/unit/ops/test_mixture.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import gemmsmith
from gemmsmith.ops.products import passes
from gemmsmith.ops.products.routing import route
from tests.support.mixtures import close, reference

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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("width", "inner"), [(2048, 768), (2880, 2880), (40, 24)])
def test_each_pass_is_what_torch_says(width: int, inner: int, dtype: torch.dtype) -> None:
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
    alike(passes.activate(*given_gpu)[:used], passes.activate(*given)[:used])
    made = passes.activate_backward(*given_gpu, gradient.cuda())
    wanted = passes.activate_backward(*given, gradient)
    alike(made[0][:used], wanted[0][:used])
    torch.testing.assert_close(made[1].cpu(), wanted[1], rtol=1e-4, atol=1e-4)
    alike(made[2][:used], wanted[2][:used])


ROUTINGS = [(1, 1, 1), (50, 4, 5), (333, 3, 100), (2048, 8, 128), (16384, 8, 128), (8192, 8, 256)]


@pytest.mark.parametrize(("tokens", "chosen", "experts"), ROUTINGS)
@pytest.mark.parametrize("others", [0, 7])
def test_routing_is_what_torch_says(tokens: int, chosen: int, experts: int, others: int) -> None:
    some = torch.randint(experts + others, (tokens, chosen))
    skewed = (some.float() / (experts + others)).pow(3).mul(experts + others).long()
    alone = torch.full_like(some, experts - 1)
    for index in (some, skewed, alone, torch.full_like(some, experts + others), some.int()):
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
        exact = [one.detach().double().requires_grad_() for one in operands]
        wanted = reference(exact[0], index, *exact[1:])
        gradient = torch.randn(tokens, width, device="cuda")
        found = gemmsmith.experts(operands[0], index, *operands[1:])
        close(found, wanted.detach())
        theirs = torch.autograd.grad(wanted, exact, gradient.double())
        ours = torch.autograd.grad(found, operands, gradient.bfloat16())
        for mine, exactly in zip(ours, theirs, strict=True):
            close(mine, exactly)


def test_a_graph_is_replayed_with_another_choice() -> None:
    tokens, chosen, experts, width, inner = 256, 4, 16, 512, 256
    operands = layer(tokens, chosen, experts, width, inner)
    index = chosen_of(tokens, experts, chosen).cuda()
    gradient = torch.randn(tokens, width, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        out = gemmsmith.experts(operands[0], index, *operands[1:])
        return out, *torch.autograd.grad(out, operands, gradient)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        index.copy_(chosen_of(tokens, experts, chosen))
        graph.replay()
        for one, again in zip(captured, step(), strict=True):
            assert torch.equal(one, again)


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_it_takes_less_time_than_transformers_own(
    tokens: int, record_property: Callable[[str, object], None]
) -> None:
    """Qwen3-30B-A3B's experts, forwards and backwards, eager, in turns."""
    from transformers import Qwen3MoeConfig
    from transformers.integrations.moe import grouped_mm_experts_forward
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    with torch.device("cuda"):
        module = Qwen3MoeExperts(config).bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, 2048, device="cuda").bfloat16().requires_grad_()
    index = chosen_of(tokens, 128, 8).cuda()
    shares = torch.rand(tokens, 8, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn_like(x)
    leaves = (x, shares, module.gate_up_proj, module.down_proj)

    def theirs() -> tuple[torch.Tensor, ...]:
        out = grouped_mm_experts_forward(module, x, index, shares)
        return out, *torch.autograd.grad(out, leaves, gradient)

    def ours() -> tuple[torch.Tensor, ...]:
        out = gemmsmith.experts(x, index, shares, module.gate_up_proj, module.down_proj)
        return out, *torch.autograd.grad(out, leaves, gradient)

    for mine, his in zip(ours(), theirs(), strict=True):
        close(mine, his.detach().double())
    times: dict[Callable[[], object], list[float]] = {theirs: [], ours: []}
    for _ in range(20):
        for step, taken in times.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
    theirs_ms, ours_ms = (sorted(taken)[len(taken) // 2] for taken in times.values())
    record_property("ms", {"transformers": theirs_ms, "gemmsmith": ours_ms})
    assert ours_ms < theirs_ms
