"""A layer of experts of Qwen3-30B-A3B: transformers' implementation and `gemmsmith.experts`.

    python -m benchmarks.experts --winners FILE -o experts.json [--device cpu --tiny] [--host]

A layer with its router, forward and backward, eager and compiled. Both sides have the same weights
and the same tokens; blocks alternate, and transformers' is compared with itself as well. A line of
JSON for each is printed and saved at once. `--host` adds the host's time of each function until all
work of a step is enqueued on the GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers as transformers_

import gemmsmith
from benchmarks.programs import hugging
from benchmarks.turns import Side, compared, described, in_turns, keep, settle
from gemmsmith.integrations.transformers import register_experts

transformers: Any = transformers_

TOKENS = (2048, 16384)
MODES = ("eager", "compiled")
SIZES = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
HOST_STEPS, HOST_FUNCTIONS = 20, 40
TINY = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="a bundle or a URL (default: none)")
    parser.add_argument("--tiny", action="store_true", help="a small layer, few repeats")
    parser.add_argument("--mode", choices=MODES, action="append", help="(default: both)")
    parser.add_argument("--host", action="store_true", help="profile the host's part of a step")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    register_experts()
    if options.winners:
        gemmsmith.use(options.winners)
    result = described(options.device) | {"layers": []}
    for mode in options.mode or MODES:
        for tokens in (16,) if options.tiny else TOKENS:
            keep(result, "layers", measured(tokens, mode, options), options.output)
    return 0


def measured(tokens: int, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both passes on both sides: milliseconds, gain, peak memory, relative differences."""
    sizes, device = SIZES | (TINY if options.tiny else {}), options.device
    torch._dynamo.reset()
    theirs, ours = layer(sizes, "grouped_mm", device), layer(sizes, "gemmsmith", device)
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(3)
    x, dy = torch.randn(2, 1, tokens, sizes["hidden_size"], device=device).bfloat16().unbind()
    x.requires_grad_()

    def step_of(block: torch.nn.Module) -> Any:
        run = torch.compile(block) if mode == "compiled" else block
        inputs = [x, *block.parameters()]

        def step(_: object = None) -> tuple[torch.Tensor, ...]:
            out: torch.Tensor = run(x)
            return out, *torch.autograd.grad(out, inputs, dy)

        return step

    steps = {"torch": step_of(theirs), "gemmsmith": step_of(ours)}
    steps["again"] = steps["torch"]
    tuned: Side = gemmsmith.patch if options.winners else nullcontext
    sides: dict[str, Side] = {"torch": nullcontext, "gemmsmith": tuned, "again": nullcontext}
    results, peaks = {}, {}
    for side in ("torch", "gemmsmith"):
        settle(device, forget=True)
        with sides[side]():
            results[side] = [tensor.detach().cpu() for tensor in steps[side]()]
        peaks[side] = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    differences = [
        float((a.float() - b.float()).norm() / a.float().norm())
        for a, b in zip(results["torch"], results["gemmsmith"], strict=True)
    ]
    alone: dict[str, Any] = {}
    for side in ("torch", "gemmsmith"):
        with sides[side]():
            alone |= hugging.split({side: steps[side]}, device)
    host: dict[str, Any] = {}
    if options.host:
        for side in ("torch", "gemmsmith"):
            with sides[side]():
                host[side] = host_functions(steps[side], device)
    seconds = in_turns(steps, sides, device=device, tiny=options.tiny)
    return {
        "tokens": tokens,
        "mode": mode,
        **compared(seconds, "gemmsmith"),
        "one_step": alone,
        **({"host_functions": host} if host else {}),
        "relative_differences": [round(difference, 5) for difference in differences],
        "peak_bytes": peaks,
    }


def host_functions(step: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """Return microseconds of a step in the slowest functions, alone and with their callees.

    The profiler slows each call of Python, so the sum is more than a step takes. The backward pass
    runs in this thread, because the profiler does not see others.
    """
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(HOST_STEPS):
            settle(device)
            profiler.enable()
            out = step()
            profiler.disable()
            del out
    stats: Any = pstats.Stats(profiler)
    functions = sorted(stats.stats.items(), key=lambda item: -item[1][2])
    us = 1e6 / HOST_STEPS
    return [
        {
            "function": f"{Path(file).name}:{name}",
            "calls": round(calls / HOST_STEPS, 1),
            "own_us": round(own * us, 1),
            "us": round(whole * us, 1),
        }
        for (file, _, name), (_, calls, own, whole, _) in functions[:HOST_FUNCTIONS]
    ]


def layer(sizes: dict[str, Any], experts: str, device: str) -> torch.nn.Module:
    """Make a layer of experts with its router, in bf16."""
    config = transformers.Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        vocab_size=128,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=experts
        )
    mlp: torch.nn.Module = model.model.layers[0].mlp
    return mlp


if __name__ == "__main__":
    sys.exit(main())
