"""The suite of the problems that another GPU's shipped winners are for, and none of this GPU's.

    python -m benchmarks.missing -o missing.toml [--gpu SLUG]

`gpu_session.py missing` tunes it, with the kernels that won on the other GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gemmsmith.ops.engine.source import local_model
from gemmsmith.program.captured import Captured
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
    lacked = missing((winner for file in files for winner in read_winners(file)), slug)
    lacked.save(options.output)
    print(f"{len(lacked.problems)} problems have winners on another GPU than {slug} alone")
    return int(not lacked.problems)


def missing(winners: Iterable[Winner], slug: str) -> Captured:
    """Problems without a winner of the GPU, as if a run had had each once."""
    known = list(winners)
    here = {winner.problem for winner in known if winner.device.slug == slug}
    lacked = Captured()
    lacked.problems.update({winner.problem for winner in known} - here)
    return lacked


if __name__ == "__main__":
    sys.exit(main())
