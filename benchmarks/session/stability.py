"""Compares the winners of several tuning runs of a problem: how much do their times differ?

    python -m benchmarks.session.stability WINNERS.jsonl --device cuda:0 --packs DIR -o FILE.json

WINNERS.jsonl has a winner on each line, the `result` of `gemmsmith tune --json`. The best kernels
of all runs of a problem and cuBLAS are timed in the paired rounds of finals. What the runs serve is
compared: a kernel, or cuBLAS where it stays. The step `stability` runs this as a program of its own
because, unlike the session, it needs the carried packages.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from gemmsmith.files import publish
from tuner.compile import ArtifactStore
from tuner.devices import DEFAULT_SWEEPS, open_device
from tuner.devices.base import Contender, Device
from tuner.errors import DeviceError, NoGpu
from tuner.measure.statistics import paired_ratio, summarize
from tuner.search.budget import BUDGETS
from tuner.search.finals import hold_finals
from tuner.trial import Finals, Winner

CUBLAS = "cuBLAS"

ROUNDS = 2 * BUDGETS[Effort.DEFAULT].policy.final_rounds
"""Twice those of a run, so that the comparison is more precise than the runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 0 if the winners of every problem could be measured."""
    options = _parse(arguments)
    runs = read(options.winners)
    if not runs:
        print(f"no winner in {options.winners}: nothing to race")
        return 1
    rows: list[dict[str, Any]] = []
    try:
        with open_device(options.device, sweeps=options.sweeps) as device:
            for problem, winners in runs.items():
                rows.append(race(device, problem, winners, ArtifactStore(options.packs)))
                document = {
                    "device": device.model.slug,
                    "environment": device.environment,
                    "problems": rows,
                }
                publish(options.output, msgspec.json.encode(document) + b"\n", shared=True)
                print(line(rows[-1]), flush=True)
    except DeviceError as error:
        print(error)
        return 2
    return 1 if any(row["error"] for row in rows) else 0


def read(path: Path) -> dict[Problem, list[Winner]]:
    """Read the winners of a file by problem; empty if there is no file."""
    runs: dict[Problem, list[Winner]] = {}
    for text in path.read_bytes().splitlines() if path.is_file() else []:
        winner = msgspec.json.decode(text, type=Winner)
        runs.setdefault(winner.problem, []).append(winner)
    return runs


def race(
    device: Device, problem: Problem, winners: Sequence[Winner], packs: ArtifactStore
) -> dict[str, Any]:
    """Measure a problem's distinct answers in common rounds, and list them fastest first.

    `over_best` is an answer's time over the fastest one's, paired round by round, with its 95%
    interval; `largest_difference` is the largest of these less 1. The best kernel of a run that
    keeps cuBLAS is raced, but is no answer. A device that cannot do it is the row's `error`.
    """
    won = Counter(_answer(winner) for winner in winners)
    found = [winner.candidate for winner in winners if winner.candidate is not None]
    distinct = {candidate.key: candidate for candidate in found}
    row: dict[str, Any] = {
        "problem": str(problem),
        "runs": len(winners),
        "uses": Counter(winner.use.value for winner in winners),
        "distinct": len(won),
        "error": None,
    }
    contenders = [_contender(device, candidate, packs) for candidate in distinct.values()]
    policy = replace(BUDGETS[Effort.DEFAULT].policy, final_rounds=ROUNDS)
    try:
        finals = hold_finals(device, problem, contenders, policy)
    except NoGpu:
        raise
    except DeviceError as error:
        return row | {"error": str(error)}
    if not finals.candidates:
        row["error"] = "no winner could be measured"
    return row | _times(finals, won)


def line(row: dict[str, Any]) -> str:
    """Write a problem's row for a log."""
    if row["error"]:
        return f"{row['problem']}: {row['error']}"
    times = ", ".join(f"{entry['median_us']:.2f} µs ({entry['won']}×)" for entry in row["winners"])
    return (
        f"{row['problem']}: {row['distinct']} winners of {row['runs']} runs, {times}; "
        f"largest difference {row['largest_difference']:.2%}"
    )


def _contender(device: Device, candidate: Candidate, packs: ArtifactStore) -> Contender:
    pack = packs.find(candidate.kernel) if device.needs_packs else None
    return Contender(candidate=candidate, pack=pack.path if pack else None)


def _answer(winner: Winner) -> str:
    """Return the key of the candidate that the winner serves, or cuBLAS."""
    if winner.use.is_default or winner.candidate is None:
        return CUBLAS
    return winner.candidate.key


def _times(finals: Finals, won: Counter[str]) -> dict[str, Any]:
    measured = dict(zip((c.key for c in finals.candidates), finals.samples_us, strict=True))
    measured[CUBLAS] = finals.baseline_us
    samples = {key: times for key, times in measured.items() if won[key] and times}
    medians = {key: summarize(times) for key, times in samples.items()}
    order = sorted(medians, key=lambda key: medians[key].median_us)
    over = {key: paired_ratio(samples[key], samples[order[0]]) for key in order}
    return {
        "rounds": len(finals.baseline_us),
        "discarded_rounds": finals.discarded_rounds,
        "conditions": finals.conditions,
        "cublas_us": summarize(finals.baseline_us).median_us if finals.baseline_us else None,
        "winners": [
            {
                "candidate": key,
                "won": won[key],
                "median_us": medians[key].median_us,
                "ci_us": (medians[key].ci_low_us, medians[key].ci_high_us),
                "over_best": over[key],
            }
            for key in order
        ],
        "largest_difference": max((ratio.median - 1 for ratio in over.values()), default=None),
        "failures": [
            {"candidate": candidate.key, "message": failure.message}
            for candidate, failure in finals.failures
        ],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.session.stability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("winners", type=Path, help="winners, one a line")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or replay:NAME")
    parser.add_argument("--packs", type=Path, required=True, help="folder of their packs")
    sweeps = Path(os.environ.get("GEMMSMITH_SWEEPS", DEFAULT_SWEEPS))
    parser.add_argument("--sweeps", type=Path, default=sweeps, help="of recorded GPUs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="result to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
