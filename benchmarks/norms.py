"""RMS norms as models write them out, beside torch's fused kernel: in whole steps, and alone.

    python -m benchmarks.norms -o norms.json [--device cpu] [--only steps|kernels|sums …]
                               [--model NAME …]

Needs torch, transformers and the library of this checkout, and no winners: of each model the norms
alone are swapped, as `gemmsmith.patch(model)` does where there are some. First come steps of models
of benchmarks/programs/hugging.py, with and without, in blocks that alternate as those of
`gemmsmith.compare` do, and torch against itself in the same way. Then one norm of each size, and
one sum of columns, as of a bias's gradient: the other kernel that is made of such sums.
A line of JSON for each is printed and kept at once, so a run that is cut off keeps what it had.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.programs import hugging
from benchmarks.turns import Side, compared, described, in_turns, keep, settle
from gemmsmith.ops.engine import functions
from gemmsmith.ops.models import norms as recipes
from gemmsmith.ops.models.forwards import Forwards
from gemmsmith.ops.models.layers import recognized, take_over
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.products import norms

MODELS = ("llama", "qwen3", "qwen3-moe", "decode")
PARTS = ("steps", "kernels", "sums")
NEW_TOKENS = 8
FIRST_STEPS = 5
"""From the same weights on each side: their losses and peaks are compared."""

WIDTHS = (128, 768, 1024, 2048, 4096, 8192)
TOKENS = (1, 16, 512, 4096, 16384)
Size = tuple[Any, torch.dtype, int, int]
SIZES: tuple[Size, ...] = (
    *((LlamaRMSNorm, torch.bfloat16, *size) for size in itertools.product(TOKENS, WIDTHS)),
    (LlamaRMSNorm, torch.bfloat16, 131072, 128),
    (LlamaRMSNorm, torch.float16, 512, 4096),
    (LlamaRMSNorm, torch.float16, 16384, 4096),
    # Gemma's norm, whose fused kernel is that for FP32.
    *((GemmaRMSNorm, torch.bfloat16, tokens, 2560) for tokens in TOKENS),
    (GemmaRMSNorm, torch.bfloat16, 131072, 256),
    # torch's own, of which the backward pass alone is another: from the least elements on.
    *((torch.nn.RMSNorm, torch.bfloat16, norms.LEAST // width, width) for width in WIDTHS),
    *((torch.nn.RMSNorm, torch.bfloat16, 16384, width) for width in WIDTHS),
    (torch.nn.RMSNorm, torch.bfloat16, 524288, 128),
    (torch.nn.RMSNorm, torch.float32, 16384, 1024),
)
TINY_SIZES: tuple[Size, ...] = (
    (LlamaRMSNorm, torch.bfloat16, 1, 128),
    (GemmaRMSNorm, torch.float16, 16, 128),
)
SUMS = (
    (4096, 1024),  # the least elements
    (8192, 1024), (8192, 3072), (16384, 1024), (16384, 4096), (65536, 1024),
)  # fmt: skip
TINY_SUMS = ((16, 128),)
ROTATED_BYTES = 256 * 2**20
"""Operands in turns: several times what L2 holds (50 MiB on a H100 or H200)."""
REPEATS, REPEAT_S = 5, 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once all that was asked for is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, few repeats")
    parser.add_argument("--only", choices=PARTS, action="append", help="(default: all)")
    parser.add_argument("--model", choices=MODELS, action="append", help="of steps (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = described(options.device)
    sizes = TINY_SIZES if options.tiny else SIZES
    measured = {
        "steps": (steps(name, options) for name in options.model or MODELS),
        "kernels": (kernels(*size, options) for size in sizes),
        "sums": (sums(*size, options) for size in (TINY_SUMS if options.tiny else SUMS)),
    }
    for part in options.only or PARTS:
        found[part] = []
        for row in measured[part]:
            keep(found, part, row, options.output)
    return 0


@contextmanager
def fused(model: torch.nn.Module, device: str) -> Iterator[None]:
    """The norms of a model are swapped, and nothing else, as if winners were in use."""
    kind, forwards = torch.device(device).type, Forwards()
    found = [one for one in recognized(model) if isinstance(one.recipe, NormRecipe)]

    def kind_in_use() -> str:
        return kind

    with mock.patch.object(recipes, "kind_in_use", kind_in_use):
        take_over(forwards, found)
        try:
            yield
        finally:
            forwards.undo()


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch's fused operator."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += "_fused_rms_norm" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


def steps(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A model's step, with and without its norms fused."""
    given = {"tiny": options.tiny, "new_tokens": NEW_TOKENS}
    firsts: dict[str, list[torch.Tensor]] = {}
    peaks: dict[str, int] = {}
    for side in ("torch", "fused"):
        settle(options.device, forget=True)
        model, parts = hugging.built(name, options.device, **given)
        step = partial(_step, parts)
        sides: dict[str, Side] = {
            "torch": nullcontext,
            "fused": partial(fused, model, options.device),
            "again": nullcontext,
        }
        with sides[side]():
            firsts[side] = [step().float().cpu() for _ in range(FIRST_STEPS)]
        peaks[side] = torch.cuda.max_memory_allocated() if options.device != "cpu" else 0
        if side == "torch":
            del model, parts, step, sides
    with sides["fused"](), _Counting() as counting:  # type: ignore[no-untyped-call]
        step()
    seconds = in_turns(step, sides, device=options.device, tiny=options.tiny)
    return {
        "model": name,
        "norms": sum(isinstance(one.recipe, NormRecipe) for one in recognized(model)),
        "fused_calls_a_step": counting.count,
        **compared(seconds, "fused"),
        **_alike(firsts["torch"], firsts["fused"]),
        "peak_bytes": peaks,
    }


def _step(parts: Any) -> torch.Tensor:
    out: Any = None
    for part in parts.values():
        out = part(out)
    return torch.as_tensor(out)


def _alike(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> dict[str, Any]:
    """Losses of both, or how many of the tokens are the same."""
    if all(one.numel() == 1 for one in theirs):
        return {"losses": {"torch": list(map(float, theirs)), "fused": list(map(float, ours))}}
    new = [(a[:, -NEW_TOKENS:] == b[:, -NEW_TOKENS:]) for a, b in zip(theirs, ours, strict=True)]
    return {"same_tokens": float(torch.stack(new).float().mean())}


def kernels(
    kind: Any, dtype: torch.dtype, tokens: int, width: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Microseconds of one norm, eager: each in turn, medians."""
    device, size = options.device, tokens * width * dtype.itemsize
    torch.manual_seed(2)
    norm = kind(width).to(device, dtype)
    number = 2 if options.tiny else min(32, max(2, ROTATED_BYTES // size))
    xs = [
        torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
        for _ in range(number)
    ]
    grads = [x.detach() for x in (*xs[1:], xs[0])]

    def forward(at: int) -> None:
        with torch.no_grad():
            norm(xs[at])

    def both(at: int) -> None:
        torch.autograd.grad(norm(xs[at]), [xs[at], norm.weight], grads[at])

    sides: dict[str, Side] = {"written_out": nullcontext, "fused": partial(fused, norm, device)}

    def timed(run: Callable[[int], None]) -> dict[str, float]:
        return alternating(
            {side: (run, context) for side, context in sides.items()}, number, options
        )

    row: dict[str, Any] = {
        "norm": kind.__name__,
        "dtype": str(dtype).partition(".")[2],
        "tokens": tokens,
        "width": width,
    }
    for name, run in (("forward", forward), ("forward_backward", both)):
        row[f"{name}_us"] = timed(run)
    return row


def sums(rows: int, columns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a sum over rows, by torch and by us: each in turn, medians. On a GPU all
    operands' sums are one CUDA graph, as the host has no part in what is asked.
    """
    size = rows * columns * torch.bfloat16.itemsize
    torch.manual_seed(2)
    number = 2 if options.tiny else min(32, max(2, ROTATED_BYTES // size))
    of_size = {"dtype": torch.bfloat16, "device": options.device}
    given = [torch.randn(rows, columns, **of_size) for _ in range(number)]

    def by_torch(at: int) -> None:
        given[at].sum(0)

    def by_us(at: int) -> None:
        functions.column_sums(given[at])

    runs: dict[str, Callable[[int], None]] = {"torch": by_torch, "gemmsmith": by_us}
    whole = 1
    if options.device != "cpu":
        runs, whole, number = {side: _graph(run, number) for side, run in runs.items()}, number, 1
    sides = {side: (run, nullcontext) for side, run in runs.items()}
    found = alternating(sides, number, options)
    us = {side: round(each / whole, 2) for side, each in found.items()}
    return {"rows": rows, "columns": columns, "us": us}


def _graph(run: Callable[[int], None], number: int) -> Callable[[int], None]:
    """All of that many calls as one."""
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(number):
            run(at)
    return lambda _: graph.replay()


def alternating(
    sides: Mapping[str, tuple[Callable[[int], None], Side]],
    number: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Median microseconds of a call on each side, of one of that many operands after the other."""
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, 2 if options.tiny else REPEATS):
        for side, (run, context) in sides.items():
            with context():
                us = _us(run, counts.get(side, 3), number, options.device)
            if repeat < 0:  # they warm up
                _us(run, 3, number, options.device)
                counts[side] = min(200, max(3, round(REPEAT_S * 1e6 / us)))
            else:
                times[side].append(us)
    return {side: round(statistics.median(us), 2) for side, us in times.items()}


def _us(run: Callable[[int], None], count: int, number: int, device: str) -> float:
    """Microseconds of a call, by the GPU's clock: while the host is slower, by the host's."""
    if device == "cpu":
        began = time.perf_counter()
        for at in range(count):
            run(at % number)
        return 1e6 * (time.perf_counter() - began) / count
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    begin.record()
    for at in range(count):
        run(at % number)
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / count


if __name__ == "__main__":
    sys.exit(main())
