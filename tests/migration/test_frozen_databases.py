"""A database of every revision there has been still opens after an upgrade, with all its rows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gemmsmith.core.problem import DType, Layout, Problem
from gemmsmith.core.tuning import JobState
from tests.migration.make_asset import ASSETS, SIGNATURE
from tests.support.records import DEVICE, ENVIRONMENT, PROBLEM, failed_trial, trial
from tuner.jobs import Job, Queue
from tuner.store import Store, current, head, upgrade
from tuner.store.keys import Scope
from tuner.store.schema import known_revisions
from tuner.store.statement import is_intact

AUDITED = ["promoted"] * 3 + ["pinned", "key-created", "key-created", "key-revoked"]
FROZEN = sorted(ASSETS.glob("*.sql"))
FP16 = Problem(m=13, n=127, k=1000, batch=2, dtype=DType.FP16, layout=Layout.NT)


def thawed(asset: Path, folder: Path) -> str:
    path = folder / "frozen.db"
    connection = sqlite3.connect(path)
    connection.executescript(asset.read_text())
    connection.close()
    return f"sqlite:///{path}"


def test_every_revision_is_frozen() -> None:
    assert [asset.stem for asset in FROZEN] == [*known_revisions()], (
        "run: python -m tests.migration.make_asset"
    )


@pytest.mark.parametrize("asset", FROZEN, ids=lambda asset: asset.stem)
def test_a_frozen_database_is_upgraded_and_read(asset: Path, tmp_path: Path) -> None:
    url = thawed(asset, tmp_path)
    assert current(url) == asset.stem
    upgrade(url)
    assert current(url) == head()
    with Store.open(url) as store:
        trials = [stored.trial for stored in store.trials()]
        assert trials == [trial(1, job="job-1"), trial(2, FP16), failed_trial(3)]
        assert store.devices() == [DEVICE]
        assert store.environments() == [ENVIRONMENT]
        newest, first = store.history(PROBLEM, DEVICE.slug)
        assert (newest.revision, first.revision) == (2, 1)
        assert newest.signature == (None if asset.stem < "0005" else SIGNATURE)
        # What was there before goes on being answered, though nobody can tell if it was altered.
        assert all(is_intact(entry) for entry in (newest, first))
        assert bool(newest.digest) is (asset.stem >= "0005")
        pinned = store.winner(PROBLEM, DEVICE.slug)
        assert pinned is not None
        assert (pinned.revision, pinned.statistics and pinned.statistics.median_us) == (1, 12.0)
        replayed = store.winner(FP16, DEVICE.slug)
        assert replayed is not None
        assert replayed.replayed
        assert store.pack_for("kernel_1") == "c0ffee"
        queue = Queue(store)
        waiting, done = queue.list()
        assert (done.state, done.winner_revision, done.best_us) == (JobState.DONE, 2, 11.5)
        assert [event.kind for event in queue.events(done.id)] == [
            "created",
            "started",
            "progress",
            "finished",
        ]
        assert (waiting.state, waiting.problem) == (JobState.WAITING, FP16)
        demand = (0, None) if asset.stem < "0002" else (96, 144.0)
        assert (waiting.calls, waiting.expected_saving_us) == demand
        assert (done.calls, done.expected_saving_us) == (0, None)
        leased = queue.lease("worker-2", [DEVICE.slug])
        assert leased is not None
        assert leased.job.id == waiting.id
        check_access(store, waiting, older=asset.stem < "0003")
        assert queue.enqueue(PROBLEM, idempotency_key="key-1") == (done, False)
        if asset.stem >= "0006":  # each API key has its own
            owned, created = queue.enqueue(PROBLEM, ordered_by="ci", idempotency_key="key-1")
            assert (owned.id, created) == (waiting.id, False)


def check_access(store: Store, waiting: Job, *, older: bool) -> None:
    keys = [(key.name, key.scope, key.job_limit) for key in store.keys.list()]
    assert keys == ([] if older else [("ci", Scope.TUNE, 50)])
    assert len(store.keys.list(inactive=True)) == (0 if older else 2)
    assert [(gpu.device, gpu.environment) for gpu in store.gpus.known()] == (
        [] if older else [(DEVICE, ENVIRONMENT)]
    )
    actions = [entry.action for entry in reversed(store.audit.entries())]
    assert actions == ([] if older else AUDITED)
    assert store.audit.verify().fault is None
    assert store.audit.verify().entries == len(actions)
    store.keys.create("after", Scope.READ)
    assert store.audit.verify().fault is None
    assert (waiting.ordered_by, waiting.deadline_at is None) == (None if older else "ci", older)
