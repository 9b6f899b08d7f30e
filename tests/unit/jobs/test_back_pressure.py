"""The queue's bounds, deadlines and second tries, on SQLite and on PostgreSQL."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from gemmsmith.core.tuning import Effort, JobState
from tests.support.queues import at_once, leased, problem
from tests.support.records import PROBLEM
from tuner.errors import JobAborted, JobNotFound, NotRetryable, QueueFull, QuotaUsedUp
from tuner.jobs import Job, LeasedJob, Queue, StopReason, Worker
from tuner.store import Store


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store, limit=3, max_attempts=3, retry_delay_s=0.0)


def fill(queue: Queue) -> list[Job]:
    return [queue.enqueue(problem(m))[0] for m in (1, 2, 3)]


def let_pass(store: Store, job: Job) -> None:
    """Put the job's deadline into the past."""
    with store.database.write() as session:
        session.execute(
            text("UPDATE jobs SET deadline_at = 1 WHERE public_id = :id"), {"id": job.id}
        )


def test_a_full_queue_takes_no_new_job_and_keeps_nothing_of_it(queue: Queue) -> None:
    jobs = fill(queue)
    with pytest.raises(QueueFull, match="3 jobs are waiting"):
        queue.enqueue(problem(4), idempotency_key="kept for later")
    assert len(queue.list()) == 3
    leased(queue)
    later, created = queue.enqueue(problem(4), idempotency_key="kept for later")
    assert created
    assert later.id not in {job.id for job in jobs}


def test_joining_and_repeating_need_no_room(queue: Queue) -> None:
    first, _ = queue.enqueue(problem(1), idempotency_key="a")
    queue.enqueue(problem(2))
    queue.enqueue(problem(3))
    joined, created = queue.enqueue(problem(2), priority=7)
    assert (created, joined.priority) == (False, 7)
    assert queue.enqueue(problem(1), idempotency_key="a") == (first, False)


def test_orders_at_once_do_not_share_the_last_place(queue: Queue) -> None:
    def is_accepted(index: int) -> bool:
        try:
            return queue.enqueue(problem(1 + index))[1]
        except QueueFull:
            return False

    assert sorted(at_once(8, is_accepted)) == [False] * 5 + [True] * 3
    assert queue.counts()[JobState.WAITING] == 3


def test_a_jobs_way_back_into_the_queue_is_never_refused(queue: Queue) -> None:
    work = [leased(queue) for _ in fill(queue)]
    for m in (4, 5, 6):
        queue.enqueue(problem(m))
    for item in work:
        item.release()
    assert queue.counts()[JobState.WAITING] == 6


def test_a_keys_quota_counts_its_waiting_and_running_jobs(store: Store) -> None:
    queue = Queue(store)
    mine, _ = queue.enqueue(problem(1), ordered_by="ann", job_limit=2)
    assert mine.ordered_by == "ann"
    leased(queue)
    queue.enqueue(problem(2), ordered_by="ann", job_limit=2)
    with pytest.raises(QuotaUsedUp, match="2 jobs of the key 'ann'"):
        queue.enqueue(problem(3), ordered_by="ann", job_limit=2)
    queue.enqueue(problem(3), ordered_by="bob", job_limit=2)
    queue.enqueue(problem(4))
    assert not queue.enqueue(problem(3), ordered_by="ann", job_limit=2)[1], "joining is free"
    queue.cancel(queue.enqueue(problem(2), ordered_by="ann", job_limit=2)[0].id)
    assert queue.enqueue(problem(5), ordered_by="ann", job_limit=2)[1]


def test_the_checks_read_indexes_only(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store.database.read() as session:
        for where, index in (
            ("state = 'waiting'", "ix_jobs_lease"),
            ("ordered_by = 'ann' AND state IN ('waiting', 'running')", "ix_jobs_ordered_by"),
        ):
            query = f"SELECT count(*) FROM (SELECT id FROM jobs WHERE {where} LIMIT 10000)"
            plan = str(session.execute(text(f"EXPLAIN QUERY PLAN {query}")).all())
            assert f"SEARCH jobs USING COVERING INDEX {index}" in plan


def test_the_pause_follows_the_rate_of_the_latest_ends(store: Store) -> None:
    queue = Queue(store)
    assert queue.pause_s() == 3600, "nothing has ended: nobody knows"
    for m in range(1, 31):
        queue.enqueue(problem(m), ordered_by="ann" if m == 1 else "bob")
        leased(queue).complete(1)
    assert queue.pause_s() == 1

    def end_apart(seconds: float) -> None:
        with store.database.write() as session:
            set_end = "UPDATE jobs SET finished_at = :now - (30 - id) * :apart"
            session.execute(text(set_end), {"now": time.time(), "apart": seconds})

    end_apart(10.0)
    assert 9 <= queue.pause_s() <= 12
    assert 285 <= queue.pause_s("ann") <= 300
    end_apart(1000.0)
    assert 740 <= queue.pause_s() <= 800, "3000 s for the last four"
    assert queue.pause_s("ann") == 3600


def test_a_job_is_not_begun_after_its_deadline(store: Store, queue: Queue) -> None:
    late, _ = queue.enqueue(problem(1), deadline_s=60.0, device="no worker has this")
    assert late.deadline_at == pytest.approx(late.created_at + 60.0, abs=5.0)
    let_pass(store, late)
    other, _ = queue.enqueue(problem(2))
    assert leased(queue).job.id == other.id
    failed = queue.get(late.id)
    assert failed.state is JobState.FAILED
    assert failed.error == "its deadline passed before a worker could begin it"
    assert [event.kind for event in queue.events(late.id)] == ["created", "failed"]


def test_overdue_jobs_hold_no_place(store: Store, queue: Queue) -> None:
    for m in (1, 2, 3):
        let_pass(store, queue.enqueue(problem(m), deadline_s=60.0)[0])
    assert queue.enqueue(problem(4))[1]
    assert queue.counts()[JobState.FAILED] == 3


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(60, 600, 600), (600, 60, 600), (60, None, None), (None, 60, None)],
)
def test_the_later_deadline_of_joined_orders_holds(
    queue: Queue, first: int | None, second: int | None, expected: int | None
) -> None:
    queue.enqueue(PROBLEM, deadline_s=first)
    joined, _ = queue.enqueue(PROBLEM, deadline_s=second)
    if expected is None:
        assert joined.deadline_at is None
    else:
        assert joined.deadline_at == pytest.approx(joined.created_at + expected, abs=5.0)


def test_an_attempt_after_the_deadline_is_not_begun_either(store: Store, queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM, deadline_s=60.0)
    leased(queue).fail("the driver has gone", retry=True)
    let_pass(store, job)
    assert queue.lease("worker-2", []) is None
    error = queue.get(job.id).error or ""
    assert "before it had a winner" in error
    assert "the driver has gone" in error


def test_a_dead_workers_job_is_not_taken_over_after_the_deadline(
    store: Store, queue: Queue
) -> None:
    job, _ = queue.enqueue(PROBLEM, deadline_s=60.0)
    leased(queue, ttl_s=0.01)
    let_pass(store, job)
    time.sleep(0.05)
    assert queue.lease("worker-2", []) is None
    assert queue.get(job.id).state is JobState.FAILED


def tuning_until_told(leased: LeasedJob) -> int | None:
    deadline = time.monotonic() + 30
    while not leased.should_stop():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    raise JobAborted("stopped; 3 trials are kept")


def test_a_running_job_stops_at_its_deadline(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM, deadline_s=1.5)
    assert Worker(queue, tuning_until_told, devices=[]).run(until_idle=True) == 1
    failed = queue.get(job.id)
    assert failed.state is JobState.FAILED
    assert failed.error == "its deadline passed before it had a winner; its trials are kept"


def test_a_job_that_has_a_winner_at_its_deadline_is_done(queue: Queue) -> None:
    def tune(leased: LeasedJob) -> int:
        with pytest.raises(JobAborted):
            tuning_until_told(leased)
        assert leased.stop_reason is StopReason.DEADLINE
        return 4  # as a tuning run does, once there is a first winner

    job, _ = queue.enqueue(PROBLEM, deadline_s=1.0)
    Worker(queue, tune, devices=[]).run(until_idle=True)
    done = queue.get(job.id)
    assert (done.state, done.winner_revision) == (JobState.DONE, 4)


def test_a_deadline_that_was_moved_while_running_is_heard_of(queue: Queue) -> None:
    queue.enqueue(PROBLEM, deadline_s=1.0)
    work = leased(queue)
    queue.enqueue(PROBLEM, deadline_s=600.0)
    work.heartbeat()
    time.sleep(1.1)
    assert not work.should_stop()


def test_a_deadline_that_was_moved_too_late_hands_the_job_back(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM, deadline_s=1.0)
    work = leased(queue)
    time.sleep(1.1)
    assert work.stop_reason is StopReason.DEADLINE
    queue.enqueue(PROBLEM)
    work.overdue()
    waiting = queue.get(job.id)
    assert (waiting.state, waiting.deadline_at) == (JobState.WAITING, None)
    assert "deadline was moved" in queue.events(job.id)[-1].data["reason"]
    assert leased(queue).job.attempt == 2


def test_an_overdue_job_that_was_to_be_cancelled_is_cancelled(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM, deadline_s=1.0)
    work = leased(queue)
    queue.cancel(job.id)
    time.sleep(1.1)
    work.overdue()
    assert queue.get(job.id).state is JobState.CANCELLED


def test_a_failed_job_is_tried_again_as_a_new_one(queue: Queue) -> None:
    old, _ = queue.enqueue(
        PROBLEM,
        effort=Effort.QUICK,
        device="h200",
        priority=3,
        calls=8,
        saving_us=1.5,
        deadline_s=600.0,
    )
    work = queue.lease("worker-1", ["h200"])
    assert work is not None
    work.fail("broken", retry=False)
    new, created = queue.retry(old.id, ordered_by="ann", idempotency_key="again")
    assert created
    assert new.id != old.id
    assert (new.state, new.problem, new.effort) == (JobState.WAITING, PROBLEM, Effort.QUICK)
    assert (new.device, new.priority, new.calls) == ("h200", 3, 8)
    assert (new.expected_saving_us, new.deadline_at, new.ordered_by) == (12.0, None, "ann")
    assert queue.retry(old.id, ordered_by="ann", idempotency_key="again") == (new, False)
    assert queue.get(old.id).error == "broken"


def test_a_cancelled_job_is_tried_again(queue: Queue) -> None:
    old, _ = queue.enqueue(PROBLEM)
    queue.cancel(old.id)
    assert queue.retry(old.id)[0].id != old.id


def test_only_what_failed_or_was_cancelled_is_tried_again(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    with pytest.raises(NotRetryable, match="is waiting"):
        queue.retry(job.id)
    work = leased(queue)
    with pytest.raises(NotRetryable, match="is running"):
        queue.retry(job.id)
    work.complete(1)
    with pytest.raises(NotRetryable, match="is done"):
        queue.retry(job.id)
    with pytest.raises(JobNotFound):
        queue.retry("nothing")
    assert len(queue.list()) == 1


def test_a_retry_needs_room_too(queue: Queue) -> None:
    old, _ = queue.enqueue(PROBLEM)
    queue.cancel(old.id)
    fill(queue)
    with pytest.raises(QueueFull):
        queue.retry(old.id)
