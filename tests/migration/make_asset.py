"""Freezes a database of the newest revision into `assets/<revision>.sql`.

Run once for every new revision, from the project's root, and commit what it writes:

    .venv/bin/python -m tests.migration.make_asset

A frozen file is never made again: it is what people who stayed at that revision have on disk.
Where a revision adds a table or a column, let `fill` write to it first.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from pathlib import Path

from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tuning import Effort
from tests.support.records import DEVICE, ENVIRONMENT, PROBLEM, failed_trial, trial, winner
from tests.support.replacing import replace
from tuner.jobs import Queue
from tuner.store import Store, head
from tuner.store.keys import LONGEST_LIFE_S, Scope
from tuner.trial import WinnerSignature

ASSETS = Path(__file__).parent / "assets"
SIGNATURE = WinnerSignature(key="0123456789abcdef", value="c2lnbmVk", pack="c0ffee")


def fill(store: Store) -> None:
    """A few rows of everything there is."""
    fp16 = Problem(m=13, n=127, k=1000, batch=2, dtype=DType.FP16, layout=Layout.NT)
    store.add_trials([trial(1, job="job-1"), trial(2, fp16), failed_trial(3)])
    store.add_pack("c0ffee", "toolchain", [trial(1).candidate.kernel], 123_456)
    store.promote(replace(winner(time=12.0), promoted_at="2026-11-20T10:00:00.000+00:00"))
    store.promote(
        replace(
            winner(time=11.0),
            promoted_at="2026-11-20T11:00:00.000+00:00",
            pack="c0ffee",
            signature=SIGNATURE,
        )
    )
    store.promote(
        replace(winner(fp16, 9.0), replayed=True, promoted_at="2026-11-20T12:00:00.000+00:00")
    )
    store.pin(PROBLEM, DEVICE.slug, 1)
    queue = Queue(store)
    done, _ = queue.enqueue(PROBLEM, effort=Effort.QUICK, idempotency_key="key-1")
    leased = queue.lease("worker-1", [])
    assert leased is not None
    assert leased.job.id == done.id
    leased.progress("screen", 3, 12, 11.5, "kernel_1@x")
    leased.complete(2)
    queue.enqueue(
        fp16,
        device=DEVICE.slug,
        priority=3,
        calls=96,
        saving_us=1.5,
        deadline_s=1e10,
        ordered_by="ci",
        idempotency_key="key-1",
    )
    store.keys.create("ci", Scope.TUNE, expires_in_s=LONGEST_LIFE_S, job_limit=50)
    store.keys.create("me", Scope.ADMIN)
    store.keys.revoke("me")
    store.gpus.report(DEVICE, ENVIRONMENT)
    queue.workers.report("host:1:0123abcd", [DEVICE.slug])


def main() -> int:
    target = ASSETS / f"{head()}.sql"
    if target.exists():
        sys.stderr.write(f"{target} exists; a frozen database is never made again\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(f"sqlite:///{path}", create=True) as store:
            fill(store)
        connection = sqlite3.connect(path)
        dump = "\n".join(connection.iterdump())
        connection.close()
    target.write_text(dump + "\n")
    sys.stdout.write(f"wrote {target}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
