"""Launches gemmsmith's winner of a problem and cuBLAS a few times under a profiler.

    ncu --profile-from-start off … python -m benchmarks.profile M N K [G] [--dtype bf16]

For a grouped product (`--dtype bf16.group_rows`) G is the number of groups, and torch's own product
is launched instead of cuBLAS. Its launches have skewed, very skewed and balanced groups in turn.
Preparations (operands, pack, cuBLAS's choice, verification) are not profiled. Run it as a module:
as a script, its name would hide the standard library's `profile`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.winners import add_packs, find_packs, find_winners
from benchmarks.side_by_side import WrongProductError, prepare
from gemmsmith.core.operation import Operation, of_dtype
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import InvalidProblem
from tuner.measure.local_gpu import local_gpu
from tuner.trial import Winner

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel

ROOT = Path(__file__).resolve().parent.parent
BUILD_LIMIT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch both; 0 if both ran and were right."""
    options = _parse(arguments)
    problem: Problem = options.problem
    model = local_gpu()
    files = options.winners or sorted((ROOT / "configs" / "winners").glob("*.jsonl"))
    winner = find_winners(files, options.database or None, model).get(problem)
    if winner is None or winner.candidate is None:
        print(f"no winner for {problem}; tune it first (`gemmsmith tune`)")
        return 1
    print(f"{problem}: {winner.candidate.key}", flush=True)
    if model is None:
        print("no CUDA GPU on this machine")
        return 2
    packs, reasons = find_packs(
        [winner.candidate.kernel], options.packs, time.monotonic() + BUILD_LIMIT_S
    )
    pack = packs.get(winner.candidate.kernel.name)
    if pack is None:
        print(f"no pack: {reasons[winner.candidate.kernel.name]}")
        return 1
    return _launch(problem, winner, pack, model, options.launches)


def _launch(problem: Problem, winner: Winner, pack: Path, model: DeviceModel, launches: int) -> int:
    import torch
    from torch.cuda import profiler

    assert winner.candidate is not None
    try:
        both = prepare(problem, winner.candidate, pack, model)
    except WrongProductError as error:
        print(error)
        return 1
    for name, ready in both.ready.items():
        with both.stream.torch():
            profiler.start()  # type: ignore[no-untyped-call]
            for i in range(launches):
                ready.launch(i + 1)
            torch.cuda.synchronize()
            profiler.stop()  # type: ignore[no-untyped-call]
        print(f"{name}: {launches} launches ({ready.note})", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    for extent in "mnk":
        parser.add_argument(extent, type=int)
    parser.add_argument("groups", type=int, nargs="?", default=1, help="of a grouped product")
    parser.add_argument("--dtype", default="bf16", help="such as bf16 or bf16.group_rows")
    parser.add_argument(
        "--layout", choices=list(Layout), help="default: the first layout of the dtype"
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--winners", type=Path, action="append", help="winners files")
    parser.add_argument("--database", default=os.environ.get("GEMMSMITH_DATABASE"))
    add_packs(parser)
    options = parser.parse_args(arguments)
    try:
        options.problem = _problem(options)
    except InvalidProblem as error:
        parser.error(str(error))
    return options


def _problem(options: argparse.Namespace) -> Problem:
    """Return the problem of the options.

    Raises:
        InvalidProblem: there is no such problem.
    """
    layout: str | None = options.layout
    operation = Operation.of(options.dtype, layout) if layout else of_dtype(options.dtype)
    return Problem.of(operation, options.m, options.n, options.k, options.groups)


if __name__ == "__main__":
    sys.exit(main())
