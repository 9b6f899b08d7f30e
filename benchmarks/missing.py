"""The suite of the problems that another GPU's shipped winners are for, and none of this GPU's.

    python -m benchmarks.missing -o missing.toml [--gpu SLUG]

`gpu_session.py missing` tunes it, with the kernels that won on the other GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.source import local_model
from tuner.exchange import read_winners
from tuner.trial import Winner

WINNERS = Path(__file__).resolve().parents[1] / "configs" / "winners"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the suite; the status is 1 if nothing is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", help="as in the names of configs/winners (default: the local one)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    slug = options.gpu or local_model()
    if slug is None:
        parser.error("there is no GPU here: name one, as --gpu nvidia-h200-132sm")
    files = sorted(WINNERS.glob("*.jsonl"))
    problems = missing((winner for file in files for winner in read_winners(file)), slug)
    options.output.write_text(suite(problems))
    print(f"{len(problems)} problems have winners on another GPU than {slug} alone")
    return int(not problems)


def missing(winners: Iterable[Winner], slug: str) -> list[Problem]:
    """Problems without a winner of the GPU, by operation."""
    here: set[Problem] = set()
    elsewhere: dict[Problem, None] = {}
    for winner in winners:
        if winner.device.slug == slug:
            here.add(winner.problem)
        else:
            elsewhere[winner.problem] = None
    return sorted((each for each in elsewhere if each not in here), key=lambda each: each.dtype)


def suite(problems: Iterable[Problem]) -> str:
    """A suite file, in TOML."""
    lines = ['name = "missing"']
    for number, problem in enumerate(problems):
        lines += [
            "\n[[problem]]",
            f'name = "{number}"',
            *(f"{name} = {getattr(problem, name)}" for name in ("m", "n", "k", "batch")),
            f'dtype = "{problem.dtype}"',
            f'layout = "{problem.layout}"',
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
