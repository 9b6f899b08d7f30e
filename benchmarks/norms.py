"""RMS norms of several operators, as in models, and torch's fused kernel: in steps, and alone.

    python -m benchmarks.norms -o norms.json [--device cpu] [--only steps|kernels|sums …]
                               [--model NAME …]

Needs torch, transformers and the library of this checkout, but no winners: only the norms of each
model are replaced, as `gemmsmith.patch(model)` does. First come steps of models of
benchmarks/programs/hugging.py, with and without fused norms, in blocks that alternate as those of
`gemmsmith.compare`, and torch against itself in the same way. Then come single norms of many sizes,
and sums of columns, as of a bias's gradient, which the gradient of a norm's weight is made of too.
A line of JSON for each is printed and saved at once, so a run that is cut off keeps its results.
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
"""Steps whose losses and peaks are compared; both sides begin with the same weights."""

WIDTHS = (128, 768, 1024, 2048, 4096, 8192)
TOKENS = (1, 16, 512, 4096, 16384)
Size = tuple[Any, torch.dtype, int, int]
SIZES: tuple[Size, ...] = (
    *((LlamaRMSNorm, torch.bfloat16, *size) for size in itertools.product(TOKENS, WIDTHS)),
    (LlamaRMSNorm, torch.bfloat16, 131072, 128),
    (LlamaRMSNorm, torch.float16, 512, 4096),
    (LlamaRMSNorm, torch.float16, 16384, 4096),
    # Gemma's norm, whose fused kernel is the one for FP32.
    *((GemmaRMSNorm, torch.bfloat16, tokens, 2560) for tokens in TOKENS),
    (GemmaRMSNorm, torch.bfloat16, 131072, 256),
    # torch's own norm: only its backward pass is replaced, from `LEAST` elements on.
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
    (4096, 1024),  # the fewest elements that are replaced
    (8192, 1024), (8192, 3072), (16384, 1024), (16384, 4096), (65536, 1024),
)  # fmt: skip
TINY_SUMS = ((16, 128),)
ROTATED_BYTES = 256 * 2**20
"""Size of the operands that calls take in turn: several times L2 (50 MiB on an H100 or H200)."""
REPEATS, REPEAT_S = 5, 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen parts, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and sizes, few repeats")
    parser.add_argument("--only", choices=PARTS, action="append", help="(default: all)")
    parser.add_argument("--model", choices=MODELS, action="append", help="for steps (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    result = described(options.device)
    sizes = TINY_SIZES if options.tiny else SIZES
    measured = {
        "steps": (steps(name, options) for name in options.model or MODELS),
        "kernels": (kernels(*size, options) for size in sizes),
        "sums": (sums(*size, options) for size in (TINY_SUMS if options.tiny else SUMS)),
    }
    for part in options.only or PARTS:
        result[part] = []
        for row in measured[part]:
            keep(result, part, row, options.output)
    return 0


@contextmanager
def fused(model: torch.nn.Module, device: str) -> Iterator[None]:
    """Replace the norms of a model, and nothing else."""
    kind, forwards = torch.device(device).type, Forwards()
    layers = [layer for layer in recognized(model) if isinstance(layer.recipe, NormRecipe)]

    def kind_in_use() -> str:
        return kind

    with mock.patch.object(recipes, "kind_in_use", kind_in_use):
        take_over(forwards, layers)
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
    """Measure a model's step, with and without fused norms."""
    variant = hugging.Variant(tiny=options.tiny, new_tokens=NEW_TOKENS)
    firsts: dict[str, list[torch.Tensor]] = {}
    peaks: dict[str, int] = {}
    for side in ("torch", "fused"):
        settle(options.device, forget=True)
        model, parts = hugging.built(name, options.device, variant)
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
        "norms": sum(isinstance(layer.recipe, NormRecipe) for layer in recognized(model)),
        "fused_calls_a_step": counting.count,
        **compared(seconds, "fused"),
        **_agreement(firsts["torch"], firsts["fused"]),
        "peak_bytes": peaks,
    }


def _step(parts: Any) -> torch.Tensor:
    out: Any = None
    for part in parts.values():
        out = part(out)
    return torch.as_tensor(out)


def _agreement(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> dict[str, Any]:
    """Return the losses of both sides, or the share of decoded tokens that are equal."""
    if all(result.numel() == 1 for result in theirs):
        return {"losses": {"torch": list(map(float, theirs)), "fused": list(map(float, ours))}}
    new = [(a[:, -NEW_TOKENS:] == b[:, -NEW_TOKENS:]) for a, b in zip(theirs, ours, strict=True)]
    return {"same_tokens": float(torch.stack(new).float().mean())}


def kernels(
    kind: Any, dtype: torch.dtype, tokens: int, width: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure a norm, eager, on both sides in turn: median microseconds."""
    device, size = options.device, tokens * width * dtype.itemsize
    torch.manual_seed(2)
    norm = kind(width).to(device, dtype)
    number = 2 if options.tiny else min(32, max(2, ROTATED_BYTES // size))
    xs = [
        torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True)
        for _ in range(number)
    ]
    grads = [x.detach() for x in (*xs[1:], xs[0])]

    def forward(i: int) -> None:
        with torch.no_grad():
            norm(xs[i])

    def both(i: int) -> None:
        torch.autograd.grad(norm(xs[i]), [xs[i], norm.weight], grads[i])

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
    """Measure a sum over rows by torch and by gemmsmith in turn: median microseconds.

    On a GPU the sums of all operands are one CUDA graph, so that the host's time does not count.
    """
    size = rows * columns * torch.bfloat16.itemsize
    torch.manual_seed(2)
    number = 2 if options.tiny else min(32, max(2, ROTATED_BYTES // size))
    kind = {"dtype": torch.bfloat16, "device": options.device}
    matrices = [torch.randn(rows, columns, **kind) for _ in range(number)]

    def by_torch(i: int) -> None:
        matrices[i].sum(0)

    def by_us(i: int) -> None:
        functions.column_sums(matrices[i])

    runs: dict[str, Callable[[int], None]] = {"torch": by_torch, "gemmsmith": by_us}
    sums_in_call = 1
    if options.device != "cpu":
        runs = {side: _graph(run, number) for side, run in runs.items()}
        sums_in_call, number = number, 1
    sides = {side: (run, nullcontext) for side, run in runs.items()}
    times = alternating(sides, number, options)
    us = {side: round(time_us / sums_in_call, 2) for side, time_us in times.items()}
    return {"rows": rows, "columns": columns, "us": us}


def _graph(run: Callable[[int], None], number: int) -> Callable[[int], None]:
    """Capture `number` calls as a CUDA graph, and return a call that replays it."""
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(number):
            run(i)
    return lambda _: graph.replay()


def alternating(
    sides: Mapping[str, tuple[Callable[[int], None], Side]],
    number: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return median microseconds of a call on each side; calls take `number` operands in turn."""
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(-1, 2 if options.tiny else REPEATS):
        for side, (run, context) in sides.items():
            with context():
                us = _us(run, counts.get(side, 3), number, options.device)
            if repeat < 0:  # a repeat to warm up, and to choose the number of calls
                _us(run, 3, number, options.device)
                counts[side] = min(200, max(3, round(REPEAT_S * 1e6 / us)))
            else:
                times[side].append(us)
    return {side: round(statistics.median(us), 2) for side, us in times.items()}


def _us(run: Callable[[int], None], count: int, number: int, device: str) -> float:
    """Return microseconds of a call by the GPU's clock; they include waiting for a slower host."""
    if device == "cpu":
        began = time.perf_counter()
        for i in range(count):
            run(i % number)
        return 1e6 * (time.perf_counter() - began) / count
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    begin.record()
    for i in range(count):
        run(i % number)
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / count


if __name__ == "__main__":
    sys.exit(main())
