"""Steps of models on three sides: torch, the shipped winners, and winners of one order of sums.

    python -m benchmarks.invariance.steps --winners invariant.gspack --plain plain.gspack -o F.json

The steps are one of training (4 layers of Qwen3 8B, 4,096 tokens, AdamW), and one of decoding (8
layers of Llama 3 8B, a token for each of 16 sequences of 256 tokens, as a CUDA graph). Products are
replaced (`gemmsmith.patch()`), and in training, on sides of their own, layers are fused as well
(`gemmsmith.patch(model)`). Blocks of steps alternate, and torch is compared with itself as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import gemmsmith
from benchmarks.invariance.values import drawn
from benchmarks.programs import hugging
from benchmarks.turns import Side, described, in_turns, keep, settle
from gemmsmith.ops.comparing import paired

Step = Callable[[], object]
PARTS = ("training", "decode")
LAYERS = {"training": 4, "decode": 8}
ROWS, CONTEXT = 16, 256
PLAIN, INVARIANT = "gemmsmith", "invariant"
FUSED = {PLAIN: "gemmsmith fused", INVARIANT: "invariant fused"}
RATIOS = (
    *((theirs, ours) for ours in (INVARIANT, FUSED[INVARIANT]) for theirs in ("torch", PLAIN)),
    (FUSED[PLAIN], FUSED[INVARIANT]), ("torch", PLAIN), ("torch", FUSED[PLAIN]), ("torch", "again"),
)  # fmt: skip
"""Sides whose times are divided by each other: the first over the second."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen steps, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", required=True, help="a bundle of winners of one order")
    parser.add_argument("--plain", required=True, help="a bundle of the other winners")
    parser.add_argument("--only", choices=PARTS, action="append", help="(default: both)")
    parser.add_argument("--tiny", action="store_true", help="small models, few repeats")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = described(options.device) | {"steps": []}
    for part in options.only or PARTS:
        settle(options.device, forget=True)
        row = {"training": training, "decode": decode}[part](options)
        keep(result, "steps", {"step": part, **row}, options.output)
    return 0


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a training step."""
    variant = hugging.Variant(tiny=options.tiny, layers=_layers("training", options))
    model, parts = hugging.built("qwen3", options.device, variant)

    def step() -> object:
        out: Any = None
        for part in parts.values():
            out = part(out)
        return out

    sides: dict[str, Side] = {"torch": nullcontext}
    for name, fused in FUSED.items():
        sides |= {name: _side(name, options, step), fused: _side(name, options, step, model)}
    sides["again"] = nullcontext
    return _compared(in_turns(step, sides, device=options.device, tiny=options.tiny))


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a decoding step, captured on each side."""
    variant = hugging.Variant(tiny=options.tiny, layers=_layers("decode", options), rows=ROWS)
    model, _ = hugging.built("decode", options.device, variant)
    step = decoding(model, ROWS, CONTEXT, options.device)
    step()
    steps = {"torch": _captured(step, options.device)}
    for name in FUSED:
        with _side(name, options, step)():
            steps[name] = _captured(step, options.device)
    steps["again"] = steps["torch"]
    seconds = in_turns(
        steps, dict.fromkeys(steps, nullcontext), device=options.device, tiny=options.tiny
    )
    return {"rows": ROWS, **_compared(seconds)}


def _layers(part: str, options: argparse.Namespace) -> int | None:
    return None if options.tiny else LAYERS[part]


def _side(name: str, options: argparse.Namespace, step: Step, model: Any = None) -> Side:
    """The context of a side's blocks; a first step in it chooses and loads the kernels."""

    @contextmanager
    def running() -> Iterator[None]:
        if name == INVARIANT:
            gemmsmith.use(options.winners, numerics="invariant")
        else:
            gemmsmith.use(options.plain)
        try:
            with gemmsmith.patch(model):
                step()
                yield
        finally:
            gemmsmith.use(None)

    return running


class FixedCache:
    """Keys and values of a prompt. Each step writes the same next token's, and reads all."""

    def __init__(self, config: Any, rows: int, length: int, device: str) -> None:
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        heads = config.num_key_value_heads
        self._kept = [
            [
                drawn(rows * heads * length, width, seed, device).view(rows, heads, length, width)
                for seed in (2 * layer, 2 * layer + 1)
            ]
            for layer in range(config.num_hidden_layers)
        ]
        self._length = length

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's keys and values last; see transformers' `Cache.update`."""
        of_keys, of_values = self._kept[layer]
        of_keys[:, :, -1:].copy_(keys)
        of_values[:, :, -1:].copy_(values)
        return of_keys, of_values

    def get_seq_length(self, *_: object) -> int:
        return self._length - 1


def decoding(model: Any, rows: int, length: int, device: str) -> Step:
    """Return a step that computes the logits of each sequence's next token."""
    cache = FixedCache(model.config, rows, length, device)
    inputs = {
        "input_ids": torch.arange(rows, device=device).view(rows, 1),
        "position_ids": torch.full((rows, 1), length - 1, device=device),
        "attention_mask": torch.ones(rows, 1, 1, length, dtype=torch.bool, device=device),
        "past_key_values": cache,
    }
    model.eval()

    def step() -> object:
        with torch.no_grad():
            return model(**inputs).logits

    return step


def _captured(step: Step, device: str) -> Step:
    """Capture a step that has run before as a CUDA graph; on the CPU, return it unchanged."""
    if device == "cpu":
        return step
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _compared(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = {
        f"{a} over {b}": paired(seconds[a], seconds[b])
        for a, b in RATIOS
        if a in seconds and b in seconds
    }
    return {
        "ms": {side: round(1e3 * statistics.median(all_), 4) for side, all_ in seconds.items()},
        "ratios": {name: round(ratio.median, 4) for name, ratio in ratios.items()},
        "intervals": {
            name: [round(ratio.ci_low, 4), round(ratio.ci_high, 4)]
            for name, ratio in ratios.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
