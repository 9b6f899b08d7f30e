"""Steps of `torch.optim.Muon`, unmodified: torch's own, and under `gemmsmith.patch()`.

    python -m benchmarks.muon -o muon.json [--winners FILE]

The sides alternate in one process, with torch against itself. The updates of equal shape are
computed at once, and winners of configs/suites/muon.toml run kernels of half the work. So do those
of an optimizer of the program, which calls an iteration of its own for one matrix after another.
A line of JSON for each model is printed and saved at once. Parameters are FP32, but for the last
line: a whole step of a model in bf16, both passes, with Muon for the matrices of its layers and
AdamW for its other parameters.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Muon

import gemmsmith
from benchmarks.programs import hugging
from benchmarks.turns import Side, compared, described, in_turns, keep, peak, settle
from tests.support import muons

Sizes = Sequence[tuple[int, int]]
MODELS: Mapping[str, Sizes] = {
    "GPT-350M": 24 * [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)],
    "Qwen3 0.6B": 28
    * [(2048, 1024), *2 * [(1024, 1024)], (1024, 2048), *2 * [(3072, 1024)], (1024, 3072)],
    "Llama 3 8B, a block": [
        *2 * [(4096, 4096)],
        *2 * [(1024, 4096)],
        *2 * [(14336, 4096)],
        (4096, 14336),
    ],
}
WHOLE = "Llama 3 8B, 4 layers"
TINY: Mapping[str, Sizes] = {"tiny": 3 * [(64, 32), (32, 64), (48, 48)]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="as `gemmsmith.use` takes them (default: auto)")
    parser.add_argument("--model", choices=[*MODELS, WHOLE], action="append", help="(default: all)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.winners or options.device != "cpu":
        gemmsmith.use(options.winners or "auto")
    result = described(options.device) | {"muon": []}
    for name, sizes in (TINY if options.tiny else MODELS).items():
        if options.model and name not in options.model:
            continue
        for kind, make in (("", Muon), (", a Muon of the program's own", muons.OwnMuon)):
            settle(options.device, forget=True)
            row = {"model": name + kind, **measured(sizes, options, make)}
            keep(result, "muon", row, options.output)
    if options.model and WHOLE not in options.model:
        return 0
    settle(options.device, forget=True)
    keep(result, "muon", {"model": f"{WHOLE}, a whole step", **whole(options)}, options.output)
    return 0


def measured(sizes: Sizes, options: argparse.Namespace, make: Any) -> dict[str, Any]:
    """Times of an optimizer's step, and bytes at its peak above what was allocated."""
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(size, device=options.device)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = make(params)
    return _in_turns(optimizer.step, gemmsmith.patch, options)


def whole(options: argparse.Namespace) -> dict[str, Any]:
    """As `measured`, of a step of 4 layers of a language model, 4,096 tokens."""
    variant = hugging.Variant(tiny=options.tiny, layers=None if options.tiny else 4)
    model, parts = hugging.built("llama", options.device, variant)
    of_layers = {
        name for name, param in model.named_parameters() if "layers" in name and param.dim() == 2
    }
    groups: list[list[Any]] = [[], []]
    for name, param in model.named_parameters():
        groups[name not in of_layers].append(param)
    optimizers: list[Any] = [Muon(groups[0]), torch.optim.AdamW(groups[1])]

    def step() -> object:
        loss = parts["backward"](parts["forward"](None))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    @contextmanager
    def patched() -> Iterator[None]:
        with gemmsmith.patch(model), gemmsmith.patch():
            yield

    return _in_turns(step, patched, options)


def _in_turns(
    step: Callable[[], object], patched: Side, options: argparse.Namespace
) -> dict[str, Any]:
    sides: dict[str, Side] = {"torch": nullcontext, "ours": patched, "again": nullcontext}
    peaks = {}
    for side in ("torch", "ours"):
        with sides[side]():
            before, most = peak(step, options.device)
        peaks[side] = most - before
    seconds = in_turns(step, sides, device=options.device, tiny=options.tiny)
    return {**compared(seconds, "ours"), "peak_bytes": peaks}


if __name__ == "__main__":
    sys.exit(main())
