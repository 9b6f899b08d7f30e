"""Weight gradients summed in FP32, in steps: the best kernels beside torch's `addmm`.

    python -m benchmarks.sums FILE.jsonl … -o sums.json [--device cuda:N] [--seconds S]

A kernel is measured alone; its power penalty estimates what it gains in a step at the power limit.
Here such steps are run: several layers of the weight's size, each with its forward product, its
input's gradient, and its weight's gradient added to an FP32 sum, as one CUDA graph. The sides
differ in the sums only. Every problem of the winners files is run with its best candidate, even if
that is not served, the highest penalties first. So the result shows whether the penalties were
right. Only kernels that are compiled take part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import gemmsmith
from benchmarks.peers.winners import add_packs, find_winners
from benchmarks.turns import compared, described, in_turns, keep
from gemmsmith.answers.snapshot import Choice
from gemmsmith.core.config import Config
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.ops.engine import fallback, functions
from tuner.compile import ArtifactStore
from tuner.devices import local_gpu
from tuner.trial import Winner

DTYPE = "bf16.out_f32.accumulate"
LAYERS = 8
LAYERS_BYTES = 40e9
TINY = Problem(m=32, n=16, k=8, dtype=DTYPE, layout=Layout.NT)

Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Best:
    """A lookup and a source of packs that answer with the best candidate of each problem."""

    def __init__(self, winners: Mapping[Problem, Winner], store: ArtifactStore) -> None:
        self._paths: dict[str, Path] = {}
        self._choices: dict[Problem, Choice] = {}
        self.winners: dict[Problem, Winner] = {}
        for problem, winner in winners.items():
            candidate = winner.candidate
            pack = None if candidate is None else store.find(candidate.kernel)
            if problem.dtype != DTYPE or candidate is None or pack is None:
                continue
            self._paths[pack.hash] = pack.path
            self.winners[problem] = winner
            self._choices[problem] = Choice(
                config=Config(kernel=candidate.kernel, launch=candidate.launch, pack=pack.hash),
                measured=problem,
                distance=0.0,
                deterministic=candidate.has_fixed_order,
            )

    def lookup(
        self, dtype: str, layout: Layout, m: int, n: int, k: int, batch: int = 1
    ) -> Choice | None:
        """See `gemmsmith.Lookup.lookup`."""
        problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
        return self._choices.get(problem)

    def path(self, pack_hash: str) -> Path:
        return self._paths[pack_hash]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as many problems as the time allows; 0 if there was one to measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("winners", type=Path, nargs="*", help="winners files")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="one small problem, few repeats")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="begin no problem after this time"
    )
    add_packs(parser)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not (options.winners or options.tiny):
        parser.error("name files of winners, such as configs/winners/*.out_f32.accumulate.jsonl")
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    best = Best(find_winners(options.winners, None, local_gpu()), ArtifactStore(options.packs))
    result, until = {**described(options.device), "steps": []}, time.monotonic() + options.seconds
    if not (best.winners or options.tiny):
        print(f"{options.packs} has no kernel of these winners: `gemmsmith compile --winners`")
        return 1
    problems = sorted(best.winners, key=lambda p: -(best.winners[p].power_penalty or 1.0))
    gemmsmith.use((best, best))
    try:
        for problem in [TINY] if options.tiny else problems:
            if time.monotonic() > until:
                break
            row = step(problem, options.device, tiny=options.tiny)
            if problem in best.winners:
                row |= _answer(best.winners[problem])
            keep(result, "steps", row, options.output)
    finally:
        gemmsmith.use(None)
    return 0


def _answer(winner: Winner) -> dict[str, Any]:
    """What is served for a problem, and the gains and the penalty that decided it."""
    return {
        "use": winner.use.value,
        "gains": {
            item.regime.value: round(item.speedup.median, 4)
            for item in winner.regimes
            if item.speedup
        },
        "power_penalty": winner.power_penalty,
    }


def step(problem: Problem, device: str, *, tiny: bool = False) -> dict[str, Any]:
    """Measure a problem's step on both sides."""
    out, inner, tokens = problem.m, problem.n, problem.k
    # Bytes of a layer: its bf16 weight and FP32 sum, and its bf16 tokens and their gradients.
    layer_bytes = 6 * out * inner + 2 * tokens * (out + inner)
    count = 2 if tiny else max(1, min(LAYERS, int(LAYERS_BYTES / layer_bytes)))
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    layers = [(draw(tokens, inner), draw(out, inner) / 64, draw(tokens, out)) for _ in range(count)]
    sums = [torch.zeros(out, inner, device=device) for _ in layers]

    def work(add: Sum) -> None:
        for (x, weight, dy), total in zip(layers, sums, strict=True):
            functional.linear(x, weight)
            add(total, dy, x)
            torch.mm(dy, weight)

    theirs = _captured(partial(work, fallback.accumulate), device)
    ours = _captured(partial(work, functions.accumulate_below), device)
    seconds = in_turns(
        {"torch": theirs, "ours": ours, "again": theirs},
        {"torch": nullcontext, "ours": nullcontext, "again": nullcontext},
        device=device,
        tiny=tiny,
    )
    return {"problem": str(problem), "layers": count, **compared(seconds, "ours")}


def _captured(work: Callable[[], None], device: str) -> Callable[[], None]:
    """Capture work as a CUDA graph; on the CPU, return it unchanged."""
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
