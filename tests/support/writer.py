"""A process that writes trials: `python -m tests.support.writer URL NUMBER COUNT`.

Every writer adds its own trials and, in between, trials that all writers add, with the same new
kernels and problems, so that writers conflict in every table. It prints how many turns it made.
"""

from __future__ import annotations

import sys

from tests.support.records import PROBLEM, trial, winner
from tests.support.replacing import replace
from tuner.store import Store


def main(url: str, number: int, count: int) -> None:
    with Store.open(url) as store:
        for turn in range(count):
            problem = replace(PROBLEM, m=1 + turn % 7)
            store.add_trial(trial(turn, problem, job=f"writer-{number}"))
            if turn % 10 == 0:
                store.add_trial(trial(turn, problem, job="everybody"))
                store.promote(winner(problem, time=float(1 + number * count + turn)))
    sys.stdout.write(f"{number} wrote {count}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
