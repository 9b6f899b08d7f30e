"""Freezes what somebody who has used release 0.1 has on disk, into `installation-0.1.0.sql.xz`.

Made once with the code of that release, in its own checkout (commit 85661e5), and never again:

    PYTHONPATH=client:. python <this file> <where to>
"""

from __future__ import annotations

import lzma
import sqlite3
import sys
import tempfile
from pathlib import Path

from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tuning import Effort
from tests.support.records import DEVICE, ENVIRONMENT, PROBLEM, failed_trial, trial, winner
from tests.support.shipped import TRUSTED
from tuner.exchange import import_winners
from tuner.jobs import Queue
from tuner.store import Store
from tuner.store.keys import Scope

FP16 = Problem(m=13, n=127, k=1000, batch=2, dtype=DType.FP16, layout=Layout.NT)


def fill(store: Store) -> None:
    """Shipped winners, two tuned problems, trials, jobs with their events, keys and a pin."""
    for path in sorted(Path("configs/winners").glob("*.jsonl")):
        import_winners(store, path, TRUSTED)
    store.add_trials([trial(1, job="job-1"), trial(2, FP16), failed_trial(3)])
    store.add_pack("c0ffee", "toolchain", [trial(1).candidate.kernel], 123_456)
    store.promote(winner(time=12.0))
    store.promote(winner(time=11.0))
    store.pin(PROBLEM, DEVICE.slug, 1)
    queue = Queue(store)
    queue.enqueue(PROBLEM, effort=Effort.QUICK, idempotency_key="key-1", ordered_by="ci")
    leased = queue.lease("worker-1", [])
    leased.progress("screen", 3, 12, 11.5, "kernel_1@x")
    leased.complete(2)
    queue.enqueue(FP16, calls=96, saving_us=1.5)
    leased = queue.lease("worker-1", [])
    leased.fail("no kernel is legal", retry=False)
    queue.enqueue(FP16, device=DEVICE.slug, priority=3)
    store.keys.create("ci", Scope.TUNE, job_limit=50)
    store.keys.create("me", Scope.ADMIN)
    store.keys.revoke("me")
    store.gpus.report(DEVICE, ENVIRONMENT)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(f"sqlite:///{path}", create=True) as store:
            fill(store)
        connection = sqlite3.connect(path)
        dump = "\n".join(connection.iterdump()) + "\n"
        connection.close()
    Path(sys.argv[1]).write_bytes(lzma.compress(dump.encode(), preset=9))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
