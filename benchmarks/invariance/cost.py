"""What one order of sums costs: torch, the winners of the order, and what others use for it.

    python -m benchmarks.invariance.cost --winners FILE -o cost.json [--seconds S]
    CUBLAS_WORKSPACE_CONFIG=:0:0 python -m benchmarks.invariance.cost … --without-triton

Every problem of configs/suites/invariant.toml is measured on all sides in shuffled rounds: CUDA
graphs of launches on operands in turn, so that L2 is cold, as the tuner measures. Sides are torch's
default; `gemmsmith.matmul` with `numerics="invariant"`; and a persistent kernel of Triton. The
second command measures cuBLAS without a workspace as torch's side, beside the same winners: torch
reads the variable when a process begins. A line of JSON for each problem is printed and saved at
once, with the geometric means so far.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gemmsmith
from benchmarks.invariance import SUITE
from benchmarks.turns import described, keep
from gemmsmith.core.operation import Layout
from gemmsmith.core.problem import Problem
from tuner.devices import local_gpu
from tuner.errors import DoesNotFit
from tuner.suites import load
from tuner.workloads.operands import Operands, OperandSet

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from tuner.measure.conditions import Monitor
    from tuner.measure.graphs import Stream

OURS = "invariant"
SEED = 41
ROUNDS = 15
SPANS: Mapping[str, Callable[[Problem], bool]] = {
    "forward, M ≤ 64": lambda p: _is_forward(p) and p.m <= 64,
    "forward, M ≥ 256": lambda p: _is_forward(p) and p.m >= 256,
    "experts": lambda p: p.operation.is_grouped,
    "input gradients": lambda p: p.layout is Layout.TT,
    "weight gradients": lambda p: p.layout is Layout.NT,
}
"""Problems whose geometric means are computed."""

Launch = Callable[[int], object]
"""Multiplies an operand set, by its number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as many problems as the time allows; 0 if all sides ran on each of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--winners", required=True, help="a bundle or a URL")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no problem afterwards")
    parser.add_argument("--without-triton", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    gemmsmith.use(options.winners, numerics="invariant")
    # What has an order, without it: torch's side is the same, and ours adds it.
    problems = [
        entry.problem("bf16")
        for entry, problem in load(SUITE).problems("bf16.sum_sequential")
        if not problem.operation.is_fused
    ]
    return measure_all(problems, options)


def measure_all(problems: Iterable[Problem], options: argparse.Namespace) -> int:
    """Measure the problems, and write a row for each; 1 if a side failed."""
    until = time.monotonic() + options.seconds
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    result = described(options.device) | {"cublas_workspace": workspace, "problems": []}
    measured: list[tuple[Problem, dict[str, float]]] = []
    failed = False
    for problem in problems:
        if time.monotonic() > until:
            failed = True
            break
        row: dict[str, Any] = {"problem": str(problem)}
        try:
            us, errors = timed(problem, triton=not options.without_triton)
            measured.append((problem, us))
            row |= {"us": {name: round(time_us, 2) for name, time_us in us.items()}}
            row |= {"over": over_torch(us), **({"errors": errors} if errors else {})}
            failed |= bool(errors)
        except DoesNotFit as error:
            row["errors"] = {"operands": str(error)}
        result["means"] = means(measured)
        keep(result, "problems", row, options.output)
    for name, figures in result.get("means", {}).items():
        print(f"{name}: {figures}", flush=True)
    return int(failed)


def _is_forward(problem: Problem) -> bool:
    return problem.layout is Layout.TN and not problem.operation.is_grouped


def over_torch(us: Mapping[str, float]) -> dict[str, float]:
    """How often each side is as fast as torch's."""
    return {name: round(us["torch"] / time_us, 4) for name, time_us in us.items()}


def means(measured: Sequence[tuple[Problem, Mapping[str, float]]]) -> dict[str, Any]:
    """For each span and side, the geometric mean of torch's time over the side's, and the worst."""
    result: dict[str, Any] = {}
    for span, holds in SPANS.items():
        within = [(problem, us) for problem, us in measured if holds(problem)]
        for side in dict.fromkeys(side for _, us in within for side in us if side != "torch"):
            ratios = {str(p): us["torch"] / us[side] for p, us in within if side in us}
            worst = min(ratios, key=ratios.__getitem__)
            result[f"{span}, {side}"] = {
                "problems": len(ratios),
                "geometric_mean": round(exp(statistics.mean(map(log, ratios.values()))), 4),
                "worst": round(ratios[worst], 4),
                "worst_problem": worst,
            }
    return result


def launches(
    sets: Sequence[OperandSet], *, triton: bool
) -> tuple[dict[str, Launch], dict[str, str]]:
    """Our side and Triton's, those that are right, and why others are not measured."""
    outputs: list[Any] = [None] * len(sets)  # kept until the same set is multiplied again

    def ours(i: int) -> torch.Tensor:
        at = i % len(sets)
        a, b, groups = sets[at].a, sets[at].b, sets[at].groups
        if groups is not None:
            outputs[at] = gemmsmith.grouped_mm(a[0], b, groups.offsets)
        else:
            outputs[at] = gemmsmith.matmul(a, b) if len(a) > 1 else gemmsmith.matmul(a[0], b[0])
        result: torch.Tensor = outputs[at]
        return result

    def by_triton(i: int) -> torch.Tensor:
        from benchmarks.invariance.persistent import matmul

        of_set = sets[i % len(sets)]
        return matmul(of_set.a[0], of_set.b[0], of_set.d[0])

    sides: dict[str, Callable[[int], torch.Tensor]] = {OURS: ours}
    if triton and len(sets[0].b) == 1:
        sides["triton"] = by_triton
    right: dict[str, Launch] = {}
    errors: dict[str, str] = {}
    for name, launch in sides.items():
        try:
            wrong = _error(launch(0), sets[0])
            if wrong > 0.02:
                errors[name] = f"the result differs from FP32's by {wrong:.3f}, relatively"
            else:
                right[name] = launch
        except Exception as error:  # noqa: BLE001 - the other sides are still measured
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    return right, errors


def _error(result: torch.Tensor, of_set: OperandSet, most: int = 64) -> float:
    """Relative error in norm against FP32, of the first rows of each matrix or expert."""
    if of_set.groups is None:
        matrices = result.reshape(-1, *result.shape[-2:])
        pairs = list(zip(matrices, of_set.a, of_set.b, strict=True))
    else:
        runs = of_set.groups.runs
        pairs = [(result[run], of_set.a[0][run], b) for run, b in zip(runs, of_set.b, strict=True)]
    rows = torch.cat([d[:most].float() for d, _, _ in pairs])
    expected = torch.cat([a[:most].float() @ b.float() for _, a, b in pairs])
    return float((rows - expected).norm() / expected.norm())


def timed(problem: Problem, *, triton: bool) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds of each side that is right, and why others are not measured.

    Raises:
        DoesNotFit: the operands do not fit into the GPU's memory.
    """
    from benchmarks.peers.measure import only, time_us
    from tuner.measure.graphs import TorchGraph
    from tuner.measure.timing import FINAL_REPLAY_US, Timer, launches_per_replay
    from tuner.measure.torch_calls import TorchCall

    model, stream, monitor = _place()
    torch.cuda.empty_cache()
    with stream.torch():
        operands = Operands(problem, model, 0, SEED)
        right, errors = launches(operands.sets, triton=triton)
    default = TorchCall(operands, stream)
    everything: dict[str, Any] = {**right, "torch": default.compute}
    sets = len(operands.sets)
    with stream.torch():
        for launch in everything.values():  # plans and compiles before the capture
            for i in range(sets):
                launch(i)
    rough = {name: time_us(launch, sets, stream, monitor) for name, launch in everything.items()}
    count = launches_per_replay(min(rough.values()), sets, FINAL_REPLAY_US)
    graphs = {name: TorchGraph(stream, count, only(run)) for name, run in everything.items()}
    timer = Timer(stream, monitor)
    timer.warm_up(graphs["torch"], rough["torch"])
    try:
        rounds = timer.rounds(list(graphs.values()), ROUNDS, seed=SEED, announce=lambda _: None)
    finally:
        torch.cuda.synchronize()
        for graph in graphs.values():
            graph.close()
    samples = dict(zip(graphs, rounds.samples_us, strict=True))
    return {name: statistics.median(of_side) for name, of_side in samples.items()}, errors


@cache
def _place() -> tuple[DeviceModel, Stream, Monitor]:
    """The GPU, a stream for all problems, and what reads the clock."""
    from tuner.measure.conditions import Monitor
    from tuner.measure.graphs import Stream
    from tuner.measure.local_gpu import gpu_uuid

    model = local_gpu()
    assert model is not None
    torch.zeros(1, device="cuda")  # makes the context that a stream needs
    return model, Stream(), Monitor(gpu_uuid())


if __name__ == "__main__":
    sys.exit(main())
