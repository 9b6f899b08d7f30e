"""Jobs whose worker freezes before its n-th write, and continues after it has lost the job.

`python -m tests.support.freeze_points URL SWEEPS`: for n = 1, 2, 3 … a job is requested, and a
worker (a fork of this process) stops itself with SIGSTOP before its n-th write transaction. Its
lease expires; the job is cancelled, or a second worker runs it. Then the first worker continues. It
must end without an error and without a change of the database. Prints how each job ended.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path

from sqlalchemy import text

from gemmsmith.core.tuning import Effort
from service import logging
from service.settings import Settings
from service.worker.process import open_worker_device
from tests.support.kill_points import expire, fork, in_child, work
from tuner.jobs import Queue
from tuner.store import Store

TABLES = ("jobs", "job_events", "trials", "winners", "audit", "packs", "kernels", "problems")


def main(url: str, sweeps: Path) -> None:
    logging.configure(json=False)  # to stderr
    settings = Settings.load({}, database=url, sweeps=sweeps, device="replay:nvidia-h200-132sm")
    device = open_worker_device(settings)
    for n, problem in zip(count(1), device.problems * 3):  # type: ignore[attr-defined]
        with Store.open(url) as store:
            job, _ = Queue(store).enqueue(problem, effort=Effort.QUICK)
        frozen = fork(partial(work, settings, device, n, "begin", signal.SIGSTOP))
        if not os.WIFSTOPPED(os.waitpid(frozen, os.WUNTRACED)[1]):
            return
        expire(url)
        if n % 4:  # the other case takes longer
            with Store.open(url) as store:
                Queue(store).cancel(job.id)
        else:
            in_child(partial(work, settings, device))
        before = content(url)
        os.kill(frozen, signal.SIGCONT)
        status = os.waitstatus_to_exitcode(os.waitpid(frozen, 0)[1])
        assert status == 0, f"write {n}: the worker ended with {status}"
        assert content(url) == before, f"write {n}: the worker has written after it woke"
        with Store.open(url) as store:
            sys.stdout.write(f"{Queue(store).get(job.id).state}\n")
    raise AssertionError("a job of so many writes?")


def content(url: str) -> dict[str, list[str]]:
    """Every row of every table that a worker writes."""
    with Store.open(url) as store, store.database.read() as session:
        return {
            table: sorted(map(str, session.execute(text(f"SELECT * FROM {table}"))))
            for table in TABLES
        }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
