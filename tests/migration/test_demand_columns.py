"""Revision 0002 adds the jobs' calls to a database in use, and takes them out again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect, text

from gemmsmith.core.tuning import JobState
from tests.support.migrating import downgrade
from tests.support.records import PROBLEM
from tuner.jobs import Queue
from tuner.store import Store, current, upgrade
from tuner.store.database import Database

ROWS = """
INSERT INTO problems (id, dtype, layout, batch, m, n, k, lg_m, lg_n, lg_k)
VALUES (1, 'bf16', 'tn', 1, 256, 4096, 4096, 8, 12, 12);
INSERT INTO jobs (public_id, problem_id, effort, device, priority, active_key, state, phase, done,
    total, cancel_requested, attempt, handed_back, max_attempts, available_at, created_at,
    last_event)
VALUES ('old', 1, 'default', '', 3, '1/default/', 'waiting', '', 0, 0, false, 0, 0, 3, 5.0, 5.0, 1);
INSERT INTO job_events (job_id, number, at, kind, data) VALUES (1, 1, 5.0, 'created', '{}');
INSERT INTO idempotency_keys (key, job_id, created_at) VALUES ('key', 1, 5.0)
"""


def rows(url: str, table: str) -> list[dict[str, Any]]:
    database = Database(url)
    with database.read() as session:
        found = [dict(row) for row in session.execute(text(f"SELECT * FROM {table}")).mappings()]
    database.close()
    return found


def test_jobs_from_before_keep_their_rows_and_get_calls(empty_database_url: str) -> None:
    url = empty_database_url
    upgrade(url, "0001")
    database = Database(url)
    with database.connect() as connection:
        for statement in ROWS.split(";"):
            connection.execute(text(statement))
    database.close()
    before = {table: rows(url, table) for table in ("jobs", "job_events", "idempotency_keys")}

    upgrade(url, "0002")
    assert rows(url, "jobs") == [before["jobs"][0] | {"calls": 0, "saving_us": 0.0}]
    upgrade(url)
    with Store.open(url) as store:
        queue = Queue(store)
        old = queue.get("old")
        assert (old.problem, old.state, old.calls) == (PROBLEM, JobState.WAITING, 0)
        assert old.expected_saving_us is None
        assert queue.enqueue(PROBLEM, calls=10**15, saving_us=2.0, idempotency_key="key")[0] == old
        joined, created = queue.enqueue(PROBLEM, calls=10**15, saving_us=2.0)
        assert (joined.id, created, joined.expected_saving_us) == ("old", False, 2e15)

    downgrade(url, "0001")
    assert current(url) == "0001"
    assert {table: rows(url, table) for table in before} == before
    database = Database(url)
    with database.connect() as connection:
        inspector = inspect(connection)
        assert "ix_jobs_lease" in {index["name"] for index in inspector.get_indexes("jobs")}
        assert {key["column_names"][0] for key in inspector.get_unique_constraints("jobs")} == {
            "active_key",
            "public_id",
        }
    database.close()

    upgrade(url, "0002")
    assert rows(url, "jobs") == [before["jobs"][0] | {"calls": 0, "saving_us": 0.0}]


def test_a_downgrade_on_sqlite_keeps_autoincrement(sqlite_url: str) -> None:
    """Rebuilding the table would have lost it, and ids of deleted jobs would be used again."""
    downgrade(sqlite_url, "0001")
    (jobs,) = (row for row in rows(sqlite_url, "sqlite_master") if row["name"] == "jobs")
    assert "AUTOINCREMENT" in jobs["sql"]
