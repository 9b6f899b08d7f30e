"""What a user of release 0.1 has on disk works with the release of now, whole.

Its dump was made once, by the code of that release (commit 85661e5), and is never made again.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, Boolean, MetaData, func, select, text

from gemmsmith.answers.history import Origin
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.core.tuning import JobState
from tests.migration.make_asset import ASSETS
from tests.support.migrating import downgrade
from tests.support.records import DEVICE, PROBLEM, failed_trial, trial
from tests.support.replacing import replace
from tests.support.shipped import TRUSTED
from tuner.exchange import Imported, import_winners, read_winners
from tuner.jobs import Queue
from tuner.store import Store, current, head, upgrade
from tuner.store.database import Database

FP16 = Problem(m=13, n=127, k=1000, batch=2, dtype="fp16", layout=Layout.NT)
FROZEN = "2026-11-23"
"""Winners promoted before are in the frozen installation; those shipped since are not."""
SHIPPED = sorted(Path("configs/winners").glob("nvidia-h200-132sm.*.jsonl"))


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "installation.db")
    packed = (ASSETS / "installation-0.1.0.sql.xz").read_bytes()
    connection.executescript(lzma.decompress(packed).decode())
    connection.row_factory = sqlite3.Row
    yield connection
    connection.close()


def moved(frozen: sqlite3.Connection, url: str) -> None:
    """The rows, as they are, in another empty database of that revision."""
    upgrade(url, "0003")
    database = Database(url)
    tables = MetaData()
    with database.connect() as connection:
        tables.reflect(connection)
        for table in tables.sorted_tables:
            if table.name == "alembic_version":
                continue
            rows = [dict(row) for row in frozen.execute(f"SELECT * FROM {table.name}")]
            for column in table.columns:
                for row in rows:
                    row[column.name] = value_of(column.type, row[column.name])
            if rows:
                connection.execute(table.insert(), rows)
            if "id" in table.columns and not database.is_sqlite:
                newest = connection.scalar(select(func.max(table.c.id)))
                sequence = func.pg_get_serial_sequence(table.name, "id")
                connection.execute(select(func.setval(sequence, newest or 1)))
    database.close()


def value_of(kind: object, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, Boolean):
        return bool(value)
    return json.loads(value) if isinstance(kind, JSON) else value


def test_nothing_is_lost_and_nothing_is_added_twice(
    frozen: sqlite3.Connection, empty_database_url: str
) -> None:
    digests = {row["id"]: row["digest"] for row in frozen.execute("SELECT id, digest FROM winners")}
    prices = {
        row["id"]: imported["price"]
        for row in frozen.execute("SELECT id, record FROM winners")
        if (imported := json.loads(row["record"])).get("price") is not None
    }
    assert len(digests) > 100
    assert prices
    counts = {
        table: frozen.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("problems", "kernels", "winners", "trials", "jobs", "job_events", "audit")
    }
    url = empty_database_url
    moved(frozen, url)
    assert upgrade(url) == head() == current(url)
    with Store.open(url) as store:
        with store.database.read() as session:
            for table, count in counts.items():
                assert session.scalar(text(f"SELECT count(*) FROM {table}")) == count
            operations = session.execute(text("SELECT operation, dtype, layout FROM problems"))
            assert all(key == f"{dtype}.{layout}" for key, dtype, layout in operations)
            kept = session.execute(text("SELECT id, digest FROM winners"))
            assert {row_id: digest for row_id, digest in kept} == digests  # noqa: C416
        winners = store.winners(device=DEVICE.slug)
        penalties = [
            imported.power_penalty for imported in winners if imported.power_penalty is not None
        ]
        assert sorted(penalties) == sorted(prices.values())
        check_use(store)
        for path in SHIPPED:
            shipped = read_winners(path)
            # What is served for PROBLEM is pinned: no import changes it.
            old = sum(w.promoted_at < FROZEN or w.problem == PROBLEM for w in shipped)
            imported = import_winners(store, path, TRUSTED)
            assert imported == Imported(added=len(shipped) - old, kept=old), path
            again = import_winners(store, path, TRUSTED)
            assert again == Imported(added=0, kept=len(shipped)), path


def check_use(store: Store) -> None:
    """Everything that the old service kept is found by the new one, and can be added to."""
    pinned = store.winner(PROBLEM, DEVICE.slug)
    assert pinned is not None
    assert (pinned.revision, pinned.pinned) == (1, True)
    assert [entry.revision for entry in store.history(PROBLEM, DEVICE.slug)] == [3, 2, 1]
    near = store.near_winners(Problem(m=300, n=4096, k=4096), DEVICE.slug, 3, 1.0)
    assert near[0].problem == PROBLEM
    # The first to name a device model says what it is; here that was a shipped winner.
    trials = [replace(stored.trial, device=DEVICE) for stored in store.trials()]
    assert trials == [trial(1, job="job-1"), trial(2, FP16), failed_trial(3)]
    [first] = store.revisions(PROBLEM, DEVICE.slug, before=2, limit=5)
    assert first.origin is Origin.IMPORTED
    queue = Queue(store)
    waiting, failed, done = queue.list()
    assert (waiting.problem, waiting.state) == (FP16, JobState.WAITING)
    assert (failed.state, failed.error) == (JobState.FAILED, "no kernel is legal")
    assert (done.winner_revision, done.best_us, done.ordered_by) == (2, 11.5, "ci")
    assert [event.kind for event in queue.events(done.id)] == [
        "created", "started", "progress", "finished",
    ]  # fmt: skip
    same, created = queue.enqueue(PROBLEM, ordered_by="ci", idempotency_key="key-1")
    assert (same.id, created) == (done.id, False)
    assert [key.name for key in store.keys.list()] == ["ci"]
    assert [key.name for key in store.keys.list(inactive=True)] == ["me", "ci"]
    wide = Problem(m=256, n=4096, k=4096, dtype="bf16.out_f32.accumulate", layout=Layout.NT)
    new, created = queue.enqueue(wide)
    assert (new.problem, created) == (wide, True)


def test_back_to_the_old_schema_and_forth(
    frozen: sqlite3.Connection, empty_database_url: str
) -> None:
    moved(frozen, empty_database_url)
    before = rows(empty_database_url)
    upgrade(empty_database_url)
    after = rows(empty_database_url)
    downgrade(empty_database_url, "0003")
    assert rows(empty_database_url) == before
    upgrade(empty_database_url)
    assert rows(empty_database_url) == after


def rows(url: str) -> dict[str, list[dict[str, Any]]]:
    database = Database(url)
    with database.read() as session:
        found = {
            table: [
                dict(row)
                for row in session.execute(text(f"SELECT * FROM {table} ORDER BY id")).mappings()
            ]
            for table in ("problems", "winners")
        }
    database.close()
    return found
