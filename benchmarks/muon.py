"""Steps of `torch.optim.Muon`, unmodified: torch's own, and under `gemmsmith.patch()`.

    python -m benchmarks.muon -o muon.json [--winners FILE]

The sides alternate in one process, with torch against itself. The updates of equal shape are
computed at once, and winners of configs/suites/muon.toml run kernels of half the work.
A line of JSON for each model is printed and saved at once. Parameters are FP32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Muon

import gemmsmith
from benchmarks.turns import Side, compared, described, in_turns, keep, peak, settle

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
TINY: Mapping[str, Sizes] = {"tiny": 3 * [(64, 32), (32, 64), (48, 48)]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="as `gemmsmith.use` takes them (default: auto)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, few repeats")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.winners or options.device != "cpu":
        gemmsmith.use(options.winners or "auto")
    result = described(options.device) | {"muon": []}
    for name, sizes in (TINY if options.tiny else MODELS).items():
        settle(options.device, forget=True)
        keep(result, "muon", {"model": name, **measured(sizes, options)}, options.output)
    return 0


def measured(sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    """Times of a step, and bytes at its peak above what was allocated."""
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(size, device=options.device)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer: Any = Muon(params)
    sides: dict[str, Side] = {"torch": nullcontext, "ours": _patched, "again": nullcontext}
    peaks = {}
    for side in ("torch", "ours"):
        with sides[side]():
            before, most = peak(optimizer.step, options.device)
        peaks[side] = most - before
    seconds = in_turns(optimizer.step, sides, device=options.device, tiny=options.tiny)
    return {**compared(seconds, "ours"), "peak_bytes": peaks}


@contextmanager
def _patched() -> Iterator[None]:
    with gemmsmith.patch():
        yield


if __name__ == "__main__":
    sys.exit(main())
