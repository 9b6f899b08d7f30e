"""The kernels that the step `invariance` of benchmarks/gpu_session.py tunes with.

    python -m benchmarks.invariance.kernels [--dtype bf16] [--compile]

Prints their names, one a line. With `--compile`, those that are in no pack yet are compiled first.
A GPU is lent for minutes, so this is a short list instead of the whole space: kernels with one
accumulator along all of K that have won more than once, on any device model; those that together
are fastest in the recorded sweeps, for few rows and for many; those that have won once; then, for
gradients, of which few were recorded, kernels with the same tiles as those of forward products.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from math import inf, log
from pathlib import Path
from statistics import median

from benchmarks.invariance import SUITE
from benchmarks.peers.winners import add_packs, find_packs
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Layout, Operation, layouts_of, of_dtype
from gemmsmith.core.summation import SEQUENTIAL
from gemmsmith.errors import InvalidProblem
from tuner.backends import offered
from tuner.devices.recording import RecordedProblem, Sweep
from tuner.exchange import read_winners
from tuner.suites import load

ROOT = Path(__file__).resolve().parents[2]
SEATS = {Layout.TN: 25, Layout.TT: 7, Layout.NT: 8}
"""Kernels of each layout."""
FUSED_SEATS = {Layout.TN: 4, Layout.TT: 3}
GROUPED_SEATS = {Layout.TN: 8}
FEW_ROWS = 64
SLICED = 0.85
"""A problem whose best sequential kernel is slower than this share of the best one is for kernels
that slice K. What such a kernel lacks must not decide."""
WORTH = log(1.002)
"""Least gain of the geometric mean for which a kernel is taken from the sweeps."""
BUILD_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the names; 1 if a kernel could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="bf16", help="such as bf16, bf16.group_rows")
    parser.add_argument("--compile", action="store_true", help="compile those in no pack")
    add_packs(parser)
    options = parser.parse_args(arguments)
    kernels = chosen(options.dtype) if _has_order(options.dtype) else []
    reasons: Mapping[str, str] = {}
    if options.compile:
        _, reasons = find_packs(kernels, options.packs, time.monotonic() + BUILD_S)
    for kernel in kernels:
        print(f"{kernel.name} {reasons.get(kernel.name, '')}".rstrip(), flush=True)
    return 1 if reasons else 0


def chosen(dtype: str) -> list[CutlassKernel]:
    """The kernels of a `dtype`, those of each layout the most useful first."""
    operation = of_dtype(dtype)
    recorded = [
        problem
        for path in sorted((ROOT / "configs" / "sweeps").glob("*.zst"))
        for problem in Sweep.load(path).problems.values()
        if problem.problem.dtype == dtype
    ]
    winners = [
        winner
        for path in sorted((ROOT / "configs" / "winners").glob(f"*.{operation.types}.*jsonl"))
        for winner in read_winners(path)
        if winner.problem.dtype == dtype
    ]
    won = Counter(
        cutlass(winner.candidate.kernel)
        for winner in winners
        if winner.candidate and _is_taken(winner.candidate)
    )
    tunable = _tunable(dtype, winners[0].device)
    result: list[CutlassKernel] = []
    fewer = GROUPED_SEATS if operation.is_grouped else FUSED_SEATS
    seats = fewer if operation.is_grouped or operation.is_fused else SEATS
    for layout in (layout for layout in seats if layout in layouts_of(dtype)):
        of_layout = [item for item in recorded if item.problem.layout is layout]
        few, many = (
            fastest([item for item in of_layout if (item.problem.m <= FEW_ROWS) is is_few])
            for is_few in (True, False)
        )
        by_turns = [kernel for pair in zip_longest(few, many) for kernel in pair if kernel]
        often = [kernel for kernel, count in won.most_common() if count > 1]
        once = [kernel for kernel, count in won.items() if count == 1]
        like_others = _with_tiles_of(result, [k for k in tunable if k.layout is layout])
        ordered = dict.fromkeys(chain(often, by_turns, once, like_others))
        taken = [k for k in ordered if k.layout is layout and k in tunable]
        result += taken[: seats[layout]]
    return result


def _tunable(dtype: str, device: DeviceModel) -> set[CutlassKernel]:
    """The kernels that a tuning run may measure on a problem of the suite."""
    entries = load(SUITE).problems(of_dtype(dtype).of_suites.dtype)
    return {
        kernel
        for _, problem in entries
        if problem.dtype == dtype
        for kernel in offered(problem, device)
        if isinstance(kernel, CutlassKernel) and kernel.summation(Launch()) == SEQUENTIAL
    }


def _has_order(dtype: str) -> bool:
    """Whether the operation can demand the order."""
    try:
        return Operation.of(f"{dtype}.sum_{SEQUENTIAL}").summation is not None
    except InvalidProblem:
        return False


def fastest(recorded: Sequence[RecordedProblem]) -> list[CutlassKernel]:
    """Kernels whose best times together have the least geometric mean, the most useful first."""
    tables = [table for item in recorded if (table := _times(item))]
    by_name = {kernel.name: kernel for table in tables for kernel in table}
    best = [1e9] * len(tables)
    result: list[CutlassKernel] = []
    while by_name:
        times = {name: _best_with(kernel, best, tables) for name, kernel in by_name.items()}
        name = min(sorted(times), key=lambda name: sum(map(log, times[name])))
        gain = sum(map(log, best)) - sum(map(log, times[name]))
        if result and gain < WORTH * len(tables):
            break
        result.append(by_name.pop(name))
        best = times[name]
    return result


def _best_with(
    kernel: CutlassKernel, best: Sequence[float], tables: Sequence[Mapping[CutlassKernel, float]]
) -> list[float]:
    return [min(us, table.get(kernel, 1e9)) for us, table in zip(best, tables, strict=True)]


def _times(recorded: RecordedProblem) -> dict[CutlassKernel, float]:
    """Microseconds of each sequential kernel's best launch; empty if slices of K win by far."""
    trials = [trial for trial in recorded.trials if trial.common_us]
    times: dict[CutlassKernel, float] = {}
    for trial in trials:
        if _is_taken(trial.candidate):
            kernel = cutlass(trial.candidate.kernel)
            times[kernel] = min(times.get(kernel, inf), median(trial.common_us))
    best = min((median(trial.common_us) for trial in trials), default=inf)
    return times if min(times.values(), default=inf) * SLICED < best else {}


def _is_taken(candidate: Candidate) -> bool:
    """Whether it adds up in the order, for aligned rows: all layers of the suite have such ones."""
    kernel = candidate.kernel
    is_aligned = kernel.alignment_a > 1 and kernel.alignment_b > 1
    return is_aligned and candidate.summation == SEQUENTIAL


def _with_tiles_of(
    others: Iterable[CutlassKernel], kernels: Iterable[CutlassKernel]
) -> Iterator[CutlassKernel]:
    """The kernels that look like `others` for many rows, of another layout; largest tiles first.

    Gradients are for thousands of tokens.
    """
    looking = {_looks(kernel): kernel for kernel in sorted(kernels, key=lambda k: k.name)}
    for other in sorted(others, key=lambda kernel: -kernel.tile[0] * kernel.tile[1]):
        if _rows(other) > FEW_ROWS and _looks(other) in looking:
            yield looking[_looks(other)]


def _looks(kernel: CutlassKernel) -> tuple[object, ...]:
    return (*kernel.choices, kernel.epilogue, kernel.stages)


def _rows(kernel: CutlassKernel) -> int:
    return kernel.tile[1 if kernel.swapped else 0]


if __name__ == "__main__":
    sys.exit(main())
