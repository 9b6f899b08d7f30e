"""Jobs whose worker is killed at its n-th commit: `python -m tests.support.kill_points URL SWEEPS`.

For n = 1, 2, 3 … a job is requested, and a worker (a fork of this process, so that it need not
import anything) is killed by SIGKILL just before its n-th COMMIT reaches the database. The database
is then in the state after commit n - 1, so the test covers all states that a kill can leave. A
second worker finishes the job. The last n is greater than the number of commits of a whole job.
Prints the jobs' identifiers.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from sqlalchemy import Connection, Engine, event, text

from gemmsmith.core.tuning import Effort
from service import logging
from service.settings import Settings
from service.worker.process import Tuning, open_worker_device
from tuner.devices.base import Device
from tuner.jobs import Queue, Worker
from tuner.store import Store

TTL_S = 600.0
"""Long enough that no heartbeat commits, because that would change which commit is the n-th."""


def main(url: str, sweeps: Path) -> None:
    logging.configure(json=False)  # to stderr
    settings = Settings.load({}, database=url, sweeps=sweeps, device="replay:nvidia-h200-132sm")
    device = open_worker_device(settings)
    for n, problem in zip(count(1), device.problems * 3):  # type: ignore[attr-defined]
        with Store.open(url) as store:
            job, _ = Queue(store).enqueue(problem, effort=Effort.QUICK)
        sys.stdout.write(f"{job.id}\n")
        sys.stdout.flush()
        killed = in_child(partial(work, settings, device, n, "commit", signal.SIGKILL))
        if not killed:
            return
        expire(url)
        in_child(partial(work, settings, device))
    raise AssertionError("a job of so many commits?")


def work(
    settings: Settings,
    device: Device,
    at: int = 0,
    moment: str = "commit",
    then: signal.Signals = signal.SIGKILL,
) -> None:
    """Work until there is no job. Send a signal just before the `at`-th "begin" or "commit"."""
    writes = count(1)

    def on_write(connection: Connection) -> None:
        if connection.get_execution_options().get("gemmsmith_writes") and next(writes) == at:
            os.kill(os.getpid(), then)

    event.listen(Engine, moment, on_write)
    with Store.open(settings.database) as store:
        tuning = Tuning(settings, store, device)
        Worker(Queue(store), tuning, devices=[device.model.slug], ttl_s=TTL_S).run(until_idle=True)


def expire(url: str) -> None:
    """Let the lease of the running job expire."""
    with Store.open(url) as store, store.database.write() as session:
        session.execute(text("UPDATE jobs SET lease_expires_at = 1 WHERE state = 'running'"))


def in_child(task: Callable[[], None]) -> bool:
    """Run the task in a fork of this process. Returns whether the fork was killed."""
    _, status = os.waitpid(fork(task), 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def fork(task: Callable[[], None]) -> int:
    """Start the task in a fork of this process. Returns the process id."""
    pid = os.fork()
    if pid == 0:
        try:
            task()
        except BaseException:  # noqa: BLE001 - a fork must never go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
