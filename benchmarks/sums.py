"""Weight gradients summed in FP32, in steps that alternate: winners beside torch's `addmm`.

    python -m benchmarks.sums winners.gspack -o sums.json [--device cuda:N] [--seconds S]

A winner is chosen on its own; its power penalty says what that is worth in a step at the power
limit. Here such steps are run: some layers of the weight's size, each with its forward product, its
input's gradient and its weight's gradient added to an FP32 sum, as one CUDA graph. The sums alone
differ between the sides. Every problem of the baked file that such a winner is for is measured, and
a line of JSON printed for it; the file has all lines, and torch beside itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import gemmsmith
from benchmarks.turns import compared, described, in_turns, keep
from gemmsmith import Bundle, Use
from gemmsmith.ops.engine import fallback, functions
from gemmsmith.problem import Layout, Problem

DTYPE = "bf16.out_f32.accumulate"
LAYERS = 8
LAYERS_BYTES = 40e9
TINY = Problem(m=32, n=16, k=8, dtype=DTYPE, layout=Layout.NT)

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once all that the time allows is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="one small problem, few repeats")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin none after so long")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.bundle is None and not options.tiny:
        parser.error("name a baked file of winners; `gemmsmith bake` writes one")
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    problems = [TINY] if options.tiny else _problems(Bundle.open(options.bundle))
    if options.bundle is not None:
        gemmsmith.use(str(options.bundle))
    found, until = {**described(options.device), "steps": []}, time.monotonic() + options.seconds
    for problem in problems:
        if time.monotonic() > until:
            break
        keep(found, "steps", step(problem, options.device, tiny=options.tiny), options.output)
    return 0


def _problems(bundle: Bundle) -> list[Problem]:
    """Those of sums whose winner is not torch's own operator: kernels before cuBLASLt's, the
    quickest first.
    """
    rows = [row for row in bundle.snapshot.rows if row.config is not None]
    uses = {row.problem: row.use for row in rows if row.problem.dtype == DTYPE}
    return sorted(uses, key=lambda p: (uses[p] is not Use.CUTLASS, p.m * p.n * p.k))


def step(problem: Problem, device: str, *, tiny: bool = False) -> dict[str, Any]:
    """One problem's step on both sides."""
    out, inner, tokens = problem.m, problem.n, problem.k
    a_layer = 6 * out * inner + 2 * tokens * (out + inner)
    count = 2 if tiny else max(1, min(LAYERS, int(LAYERS_BYTES / a_layer)))
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    layers = [(draw(tokens, inner), draw(out, inner) / 64, draw(tokens, out)) for _ in range(count)]
    sums = [torch.zeros(out, inner, device=device) for _ in layers]

    def work(add: Sum) -> None:
        for (x, weight, dy), into in zip(layers, sums, strict=True):
            functional.linear(x, weight)
            add(into, dy, x)
            torch.mm(dy, weight)

    torchs = _captured(partial(work, fallback.accumulate), device)
    ours = _captured(partial(work, functions.accumulate_below), device)
    seconds = in_turns(
        {"torch": torchs, "ours": ours, "again": torchs},
        {"torch": nullcontext, "ours": nullcontext, "again": nullcontext},
        device=device,
        tiny=tiny,
    )
    return {"problem": str(problem), "layers": count, **compared(seconds, "ours")}


def _captured(work: Callable[[], None], device: str) -> Callable[[], None]:
    """The same as a CUDA graph; on the CPU as it is."""
    work()
    if device == "cpu":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


if __name__ == "__main__":
    sys.exit(main())
