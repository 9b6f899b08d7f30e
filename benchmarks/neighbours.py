"""What a neighbour's winner gains on a problem whose own winner is known.

    python -m benchmarks.neighbours FILE.jsonl … -o neighbours.json [--device cuda:N] [--seconds S]

Each problem of the winners files is treated as not tuned. The kernels of its nearest problems are
timed on it against the default, in paired rounds as in finals. So the result shows, by distance and
by the neighbour's gain on its own problem, when a kernel may be run on a problem where it was not
measured. Only kernels that are compiled take part. The order is a fixed shuffle, so that a run that
is cut off has problems of every kind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.winners import add_packs, find_winners
from gemmsmith.core.config import MAX_DISTANCE
from gemmsmith.core.neighbours import Neighbourhood
from gemmsmith.core.problem import Problem
from gemmsmith.files import publish
from tuner.backends import is_legal
from tuner.compile import ArtifactStore
from tuner.devices import Contender, Device, Policy, open_device
from tuner.errors import TunerError
from tuner.measure.statistics import paired_ratio
from tuner.trial import Winner

NEIGHBOURS = 3
ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, and winners of its nearest problems, with distinct candidates."""

    problem: Problem
    winners: tuple[Winner, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as many problems as the time allows, and return 0."""
    options = _parse(arguments)
    with open_device(options.device) as device:
        winners = find_winners(options.winners, None, device.model)
        chosen = [case for case in cases(winners) if options.dtype in (None, case.problem.dtype)]
        store, until = ArtifactStore(options.packs), time.monotonic() + options.seconds
        rows: list[dict[str, Any]] = []
        for case in chosen:
            if time.monotonic() > until:
                break
            try:
                rows += measured(device, case, list(_compiled(case, device, store)))
            except TunerError as error:
                print(f"{case.problem}: {error}", flush=True)
            document = {"device": device.model.slug, "of": len(chosen), "rows": rows}
            publish(options.output, json.dumps(document).encode() + b"\n", shared=True)
    return 0


def cases(winners: dict[Problem, Winner]) -> Iterator[Case]:
    """Yield each problem that has a neighbour whose kernel can run on it, shuffled."""
    problems = sorted(winners)
    random.Random(1).shuffle(problems)
    around = Neighbourhood[Winner]()
    for order, (problem, winner) in enumerate(winners.items()):
        around.put(problem, order, winner)
    for problem in problems:
        chosen: dict[str, Winner] = {}
        for _, near in around.nearest(problem, len(problems), MAX_DISTANCE):
            candidate = near.runs
            if len(chosen) == NEIGHBOURS:
                break
            if candidate and near.problem != problem and is_legal(candidate, problem):
                chosen.setdefault(candidate.key, near)
        if chosen:
            yield Case(problem=problem, winners=tuple(chosen.values()))


def _compiled(case: Case, device: Device, store: ArtifactStore) -> Iterator[Contender]:
    for winner in case.winners:
        assert winner.candidate is not None
        pack = store.find(winner.candidate.kernel)
        if pack is not None or not device.needs_packs:
            path = None if pack is None else pack.path
            yield Contender(candidate=winner.candidate, pack=path)


def measured(device: Device, case: Case, contenders: list[Contender]) -> Iterator[dict[str, Any]]:
    """Yield a row for each neighbour: its gain on its own problem, and its kernel's gain here."""
    if not contenders:
        return
    finals = device.finals(case.problem, contenders, Policy(final_rounds=ROUNDS))
    for winner in case.winners:
        if winner.candidate not in finals.candidates:
            continue
        index = finals.candidates.index(winner.candidate)
        gains = {
            regime.value: paired_ratio(rounds.baseline_us, rounds.samples_us[index]).median
            for regime, rounds in finals.regimes.items()
            if rounds.samples_us[index]
        }
        row = {
            "problem": str(case.problem),
            "extents": [case.problem.m, case.problem.n, case.problem.k],
            "measured": [winner.problem.m, winner.problem.n, winner.problem.k],
            "distance": round(case.problem.distance(winner.problem), 3),
            "candidate": winner.candidate.key,
            "gained": None if winner.speedup is None else round(winner.speedup.median, 4),
            "gains": {regime: round(gain, 4) for regime, gain in gains.items()},
        }
        print(json.dumps(row), flush=True)
        yield row


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("winners", type=Path, nargs="+", help="winners files")
    parser.add_argument("--device", default="cuda:0", help="cuda:N")
    parser.add_argument("--dtype", help="only problems of this dtype")
    add_packs(parser)
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="begin no problem after this time"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
