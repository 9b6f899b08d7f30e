"""Who lives: workers that reported lately, or renew a job's lease; alike on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from gemmsmith.core.problem import Problem
from tests.support.records import DEVICE
from tuner.jobs import Queue, Worker, taker
from tuner.jobs.workers import FORGOTTEN_S, SILENT_S
from tuner.store import Store
from tuner.store.models import WorkerRow
from tuner.store.sql import now

PROBLEM = Problem(m=8, n=16, k=32)


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store)


def silent_for(store: Store, owner: str, seconds: float) -> None:
    with store.database.write() as session:
        session.execute(
            update(WorkerRow).where(WorkerRow.owner == owner).values(seen_at=now() - seconds)
        )


def test_a_worker_lives_while_it_reports(store: Store, queue: Queue) -> None:
    assert queue.workers.alive() == []
    for owner in ("b:2:x", "a:1:x"):
        queue.workers.report(owner, [DEVICE.slug])
        queue.workers.report(owner, [DEVICE.slug, "cuda:0"])
    first, second = queue.workers.alive()
    assert (first.host, first.devices, first.job) == ("a", (DEVICE.slug, "cuda:0"), None)
    silent_for(store, "a:1:x", SILENT_S + 5)
    assert queue.workers.alive() == [second]
    silent_for(store, "b:2:x", -SILENT_S - 60)  # a clock that was set back since
    assert queue.workers.alive() == []
    queue.workers.leave("b:2:x")
    silent_for(store, "a:1:x", FORGOTTEN_S + 5)
    queue.workers.report("c:3:x", [])
    with store.database.read() as session:
        assert [row.owner for row in session.query(WorkerRow)] == ["c:3:x"]


def test_a_lease_says_that_its_worker_lives(store: Store, queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    queue.workers.report("a:1:x", [DEVICE.slug])
    leased = queue.lease("a:1:x", [DEVICE.slug])
    assert leased is not None
    silent_for(store, "a:1:x", SILENT_S + 5)
    [worker] = queue.workers.alive()
    assert (worker.job, worker.devices) == (job.id, (DEVICE.slug,))
    leased.complete(None)
    assert queue.workers.alive() == []


def test_a_job_is_taken_by_who_answers_to_its_device(queue: Queue) -> None:
    anywhere, _ = queue.enqueue(PROBLEM)
    there, _ = queue.enqueue(PROBLEM, device=DEVICE.slug)
    queue.workers.report("a:1:x", ["another"])
    alive = queue.workers.alive()
    assert taker(alive, anywhere) == alive[0]
    assert taker(alive, there) is None
    assert taker([], anywhere) is None
    queue.workers.report("b:1:x", [DEVICE.slug])
    assert queue.lease("a:1:x", ["another"]) is not None
    worker = taker(queue.workers.alive(), anywhere)
    assert worker is not None
    assert worker.owner == "b:1:x", "an idle one comes first"


def test_a_worker_reports_when_it_begins_and_leaves_when_it_ends(queue: Queue) -> None:
    seen = []
    queue.enqueue(PROBLEM)

    def tune(leased: object) -> int:
        seen.extend(queue.workers.alive())
        return 1

    worker = Worker(queue, tune, devices=[DEVICE.slug])
    assert worker.run(until_idle=True) == 1
    assert [(one.owner, one.devices) for one in seen] == [(worker.owner, (DEVICE.slug,))]
    assert queue.workers.alive() == []
