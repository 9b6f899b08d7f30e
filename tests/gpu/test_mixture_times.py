"""What layers of experts take on a GPU, beside transformers' own and torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import gemmsmith
from tests.gpu.test_mixture import chosen_of, layer, on_gpu


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261123)


def own_steps(x: torch.Tensor, index: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """As transformers' grouped implementation."""
    shares, gate_up, down = weights
    number, order = index.flatten().sort()
    last = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(number, last, right=True, out_int32=True)
    rows = x[order // index.shape[1]]
    gate, up = torch._grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends)
    out = out * shares.flatten()[order, None]
    return out[order.argsort()].view(*index.shape, -1).sum(1)


def test_frozen_experts_take_no_more_time_and_memory_than_torchs_own(
    record_property: Callable[[str, object], None],
) -> None:
    """Qwen3-30B-A3B's, of whose backward pass only the tokens' gradient is needed."""
    x, shares, gate_up, down = (one.detach() for one in layer(4096, 8, 128, 2048, 768))
    index = on_gpu(4096, 128, 8)

    def measured(compute: Callable[..., torch.Tensor]) -> tuple[float, float]:
        taken, peak = [], 0
        for _ in range(8):
            leaf = x.detach().requires_grad_()
            out = compute(leaf, index, shares, gate_up, down)
            gradient = torch.ones_like(out)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out.backward(gradient)
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
            peak = torch.cuda.max_memory_allocated() - held
        return min(taken), peak / 2**20

    (ours_ms, ours_mib), (theirs_ms, theirs_mib) = measured(gemmsmith.experts), measured(own_steps)
    record_property("ms", {"torch": theirs_ms, "gemmsmith": ours_ms})
    record_property("MiB", {"torch": theirs_mib, "gemmsmith": ours_mib})
    assert ours_mib <= 1.1 * theirs_mib
    assert ours_ms <= 1.1 * theirs_ms


def experts_of(kind: str) -> Any:
    """Experts of Qwen3-30B-A3B or of gpt-oss-20b."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    qwen3 = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    gpt_oss = GptOssConfig(num_local_experts=32)
    with torch.device("cuda"):
        module: Any = Qwen3MoeExperts(qwen3) if kind == "qwen3" else GptOssExperts(gpt_oss)
    module = module.bfloat16()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def exactly(
    module: Any,
    x: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The output and all gradients in FP64, an expert at a time."""
    wide = deepcopy(module).double()
    wide.config._experts_implementation = "eager"
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, shares)]
    out = wide(leaves[0], index, leaves[1])
    leaves += wide.parameters()
    return out.detach(), *torch.autograd.grad(out, leaves, gradient.double())


@pytest.mark.parametrize("tokens", [2048, 16384])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_it_takes_less_time_than_transformers_own(
    kind: str, tokens: int, record_property: Callable[[str, object], None]
) -> None:
    """A layer of experts, forwards and backwards, eager, in turns."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    from gemmsmith.ops.models.expert_layers import experts_forward, learn

    learn()
    module = experts_of(kind)
    experts, chosen = module.num_experts, module.config.num_experts_per_tok
    width = module.config.hidden_size
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    index = chosen_of(tokens, experts, chosen).cuda()
    shares = torch.rand(tokens, chosen, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn_like(x)
    leaves = (x, shares, *module.parameters())

    def step(compute: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        out = compute(module, x, index, shares)
        return out, *torch.autograd.grad(out, leaves, gradient)

    ways = {"transformers": grouped_mm_experts_forward, "gemmsmith": experts_forward}
    results = (exactly(module, x, index, shares, gradient), *map(step, ways.values()))
    for exact, his, mine in zip(*results, strict=True):
        theirs, ours = ((result.double() - exact).norm() / exact.norm() for result in (his, mine))
        assert ours <= 1.1 * theirs + 1e-3
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(20):
        for way, taken in times.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(ways[way])
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
    medians = {way: sorted(taken)[len(taken) // 2] for way, taken in times.items()}
    record_property("ms", medians)
    assert medians["gemmsmith"] < medians["transformers"]
