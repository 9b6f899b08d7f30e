"""The head of a language model with its loss, both passes, beside its three products alone.

    python -m benchmarks.heads -o heads.json [--winners FILE] [--chunk-bytes N …]

The sides alternate in one process: the three products, torch eager and compiled, compiled with our
pass over graphs if there are winners, `gemmsmith.linear_cross_entropy` with chunks of each number
of bytes, and Liger's fused function if it can be imported. Times in ms, and the most memory above
weight and input in GB. A line of JSON for each size is printed and saved at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

import gemmsmith
from benchmarks.turns import Side, described, in_turns, keep, peak
from gemmsmith.ops.products import losses

SIZES = (
    *((4096, 4096, 128256), (8192, 2048, 151936), (16384, 1024, 50304)),
    *((4096, 1600, 50257), (8192, 1024, 30522)),  # GPT-2 XL and BERT: not aligned
)
"""Rows, width and vocabulary."""
TINY_SIZES = ((64, 32, 96),)

Step = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all sizes, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", help="as `gemmsmith.use` takes them (default: none)")
    parser.add_argument("--chunk-bytes", type=int, nargs="+", default=[losses.MOST_BYTES])
    parser.add_argument("--frozen", action="store_true", help="the gradient of x alone")
    parser.add_argument("--tiny", action="store_true", help="a small size, few repeats")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.winners:
        gemmsmith.use(options.winners)
    result = described(options.device) | {"heads": []}
    for size in TINY_SIZES if options.tiny else SIZES:
        keep(result, "heads", measured(size, options), options.output)
    return 0


def measured(size: tuple[int, int, int], options: argparse.Namespace) -> dict[str, Any]:
    """Measure both passes at one size: medians in ms, and peaks in GB."""
    rows, width, vocabulary = size
    torch._dynamo.reset()  # else sizes after the first are symbols
    torch.manual_seed(1)
    with torch.device(options.device):
        x = torch.randn(rows, width, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(vocabulary, width, dtype=torch.bfloat16).div_(width**0.5)
        labels = torch.randint(vocabulary, (rows,))
    weight.requires_grad_(not options.frozen)
    leaves = [x] if options.frozen else [x, weight]

    def both(function: Callable[..., torch.Tensor]) -> Step:
        return lambda: torch.autograd.grad(function(x, weight, labels), leaves)

    ours = [f"gemmsmith, {most / 2**20:.0f} MiB" for most in options.chunk_bytes]
    steps: dict[str, Step] = {
        "products": partial(_products, x.detach(), weight.detach(), len(leaves)),
        "torch": both(_by_torch),
        "compiled": both(torch.compile(_by_torch)),
        **dict.fromkeys(ours, both(gemmsmith.linear_cross_entropy)),
    }
    if options.winners:  # else nothing is in use, and the pass leaves all graphs
        passed: Any = gemmsmith.inductor_pass()
        places = {"joint_custom_pre_pass": passed, "pre_grad_custom_pass": passed}
        steps["compiled, with the pass"] = both(torch.compile(_by_torch, options=places))
    if liger := _liger():
        steps["liger"] = both(liger)
    sides: dict[str, Side] = dict.fromkeys(steps, nullcontext)
    for side, most in zip(ours, options.chunk_bytes, strict=True):
        sides[side] = partial(_chunks_of, most)
    peaks = {side: _peak(step, sides[side], options.device) for side, step in steps.items()}
    seconds = in_turns(steps, sides, device=options.device, tiny=options.tiny)
    ms = {side: round(1e3 * statistics.median(times), 3) for side, times in seconds.items()}
    over = {side: round(time / ms["products"], 3) for side, time in ms.items()}
    return {"size": size, "frozen": options.frozen, "ms": ms, "over_products": over, "gb": peaks}


@contextmanager
def _chunks_of(most: int) -> Iterator[None]:
    with mock.patch.object(losses, "MOST_BYTES", most):
        yield


def _products(x: torch.Tensor, weight: torch.Tensor, gradients: int) -> None:
    logits = x @ weight.t()
    logits @ weight
    if gradients > 1:
        logits.t() @ x


def _by_torch(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), labels)


def _liger() -> Callable[..., torch.Tensor] | None:
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        return None
    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda x, weight, labels: loss(weight, x, labels)


def _peak(step: Step, side: Side, device: str) -> float:
    with side():
        before, most = peak(step, device)
    return round((most - before) / 1e9, 2)


if __name__ == "__main__":
    sys.exit(main())
