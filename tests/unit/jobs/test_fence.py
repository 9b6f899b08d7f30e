"""What a worker writes to the store after it has lost its job is refused, and changes nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from gemmsmith.core.tuning import JobState
from tests.support.candidates import KERNEL
from tests.support.queues import leased
from tests.support.records import DEVICE, PROBLEM, trial, winner
from tests.support.replacing import replace
from tuner.errors import JobAborted, LeaseLost
from tuner.jobs import LeasedJob, Queue, StopReason, Worker
from tuner.store import Store


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store, retry_delay_s=0.0)


def let_lapse(store: Store) -> None:
    with store.database.write() as session:
        session.execute(text("UPDATE jobs SET lease_expires_at = 1"))


def taken_over(store: Store, queue: Queue, job: str) -> None:
    let_lapse(store)
    leased(queue, "heir")


def cancelled(store: Store, queue: Queue, job: str) -> None:
    let_lapse(store)
    assert queue.cancel(job).state is JobState.CANCELLED


def done(store: Store, queue: Queue, job: str) -> None:
    let_lapse(store)
    leased(queue, "heir").complete(1)


@pytest.mark.parametrize("lose", [taken_over, cancelled, done])
def test_nothing_is_written_to_the_store(store: Store, queue: Queue, lose: object) -> None:
    job, _ = queue.enqueue(PROBLEM)
    zombie = leased(queue, "zombie")
    fenced = store.fenced(zombie.fence)
    fenced.add_trial(trial(0, job=job.id))
    fenced.promote(winner())
    fenced.add_pack("a" * 64, "nvcc", [KERNEL], 1)
    before = store.counts(), store.sequence(), store.audit.entries()
    lose(store, queue, job.id)  # type: ignore[operator]
    mine = len(store.audit.entries()) - len(before[2])  # a cancellation is on record
    late = replace(winner(time=9.0), problem=replace(PROBLEM, m=PROBLEM.m + 1), job=job.id)
    writes = (
        lambda: fenced.add_trial(trial(1, job=job.id)),
        lambda: fenced.add_trials([trial(1), trial(2)]),
        lambda: fenced.promote(late),
        lambda: fenced.promote(replace(winner(time=9.0), job=job.id)),
        lambda: fenced.add_pack("b" * 64, "nvcc", [KERNEL], 1),
        lambda: fenced.remove_pack("a" * 64),
        lambda: fenced.gpus.report(DEVICE, winner().environment),
    )
    for write in writes:
        with pytest.raises(LeaseLost, match="taken over, or is over"):
            write()
    assert zombie.stop_reason is StopReason.LOST
    assert (store.counts(), store.sequence()) == before[:2]
    assert store.audit.entries()[mine:] == before[2]
    assert store.promote(replace(late, job=None)).revision == 1, "nobody's job, so no fence"


def test_writing_to_the_store_renews_the_lease(store: Store, queue: Queue) -> None:
    queue.enqueue(PROBLEM)
    work = leased(queue, "worker")
    let_lapse(store)
    store.fenced(work.fence).add_trial(trial())
    assert queue.lease("another", []) is None


def test_a_cancelled_job_promotes_nothing(store: Store, queue: Queue) -> None:
    """Whoever was told that the job will be cancelled is not served its winner afterwards."""
    job, _ = queue.enqueue(PROBLEM)

    def tune(leased: LeasedJob) -> int:
        fenced = store.fenced(leased.fence)
        fenced.add_trial(trial(job=job.id))
        assert queue.cancel(job.id).state is JobState.RUNNING
        with pytest.raises(JobAborted, match="its trials are kept"):
            fenced.promote(replace(winner(), job=job.id))
        assert leased.stop_reason is StopReason.CANCELLED
        return fenced.promote(replace(winner(), job=job.id)).revision

    Worker(queue, tune, devices=[]).run(until_idle=True)
    assert queue.get(job.id).state is JobState.CANCELLED
    assert store.winner(PROBLEM, DEVICE.slug) is None
    assert len(store.trials(job=job.id)) == 1


def test_a_winner_lost_while_it_is_promoted_ends_the_run_quietly(
    store: Store, queue: Queue
) -> None:
    job, _ = queue.enqueue(PROBLEM)

    def tune(leased: LeasedJob) -> int:
        done(store, queue, job.id)
        return store.fenced(leased.fence).promote(replace(winner(), job=job.id)).revision

    assert Worker(queue, tune, devices=[]).run(until_idle=True) == 1
    assert store.winner(PROBLEM, DEVICE.slug) is None
    assert queue.get(job.id).winner_revision == 1, "as its heir has left it"
