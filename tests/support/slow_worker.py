"""A worker whose tuning is slow and only recorded: `python -m tests.support.slow_worker URL TTL`.

It records `CANDIDATES` trials for a job, `PAUSE_S` apart, skips trials that the store has, and
prints a line for each trial that it adds. The winner of every job is revision 7.
"""

from __future__ import annotations

import sys
import time

from tests.support.records import trial
from tuner.errors import JobAborted
from tuner.jobs import LeasedJob, Queue, Worker
from tuner.store import Store

CANDIDATES = 12
PAUSE_S = 0.15


def tuning(store: Store, leased: LeasedJob) -> int:
    job = leased.job
    recorded = {stored.trial.candidate.key for stored in store.trials(job=job.id)}
    for number in range(CANDIDATES):
        if leased.should_stop():
            raise JobAborted("stopped")
        measured = trial(number, job.problem, job=job.id)
        if measured.candidate.key in recorded:
            continue
        time.sleep(PAUSE_S)
        store.add_trial(measured)
        leased.progress("screen", number + 1, CANDIDATES, 10.0, measured.candidate.key)
        sys.stdout.write(f"added {number}\n")
        sys.stdout.flush()
    return 7


def main(url: str, ttl_s: float) -> None:
    with Store.open(url) as store:
        Worker(
            Queue(store),
            lambda leased: tuning(store, leased),
            devices=["h200"],
            ttl_s=ttl_s,
            poll_s=0.05,
        ).run()
    sys.stdout.write("ended\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
