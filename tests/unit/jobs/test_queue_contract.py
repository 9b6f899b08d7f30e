"""The queue's promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

from gemmsmith.core.tuning import Effort, JobState
from tests.support.queues import at_once, leased, problem
from tests.support.records import PROBLEM
from tuner.errors import JobNotFound, LeaseLost
from tuner.jobs import Queue, StopReason
from tuner.store import Store


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store, max_attempts=3, retry_delay_s=0.0)


def kinds(queue: Queue, job_id: str) -> list[str]:
    return [event.kind for event in queue.events(job_id)]


def test_a_job_from_request_to_winner(queue: Queue) -> None:
    job, created = queue.enqueue(PROBLEM, effort=Effort.QUICK, device="h200", priority=2)
    assert created
    assert (job.state, job.problem, job.effort) == (JobState.WAITING, PROBLEM, Effort.QUICK)
    assert (job.device, job.priority, job.attempt) == ("h200", 2, 0)
    assert abs(job.created_at - time.time()) < 60

    work = leased(queue)
    assert work.job.id == job.id
    work.progress("screen", 1, 10, 12.5, "kernel@launch")
    running = queue.get(job.id)
    assert (running.state, running.phase, running.done, running.total) == (
        JobState.RUNNING,
        "screen",
        1,
        10,
    )
    assert (running.best_us, running.best, running.attempt) == (12.5, "kernel@launch", 1)
    assert running.started_at is not None
    work.event("winner", {"revision": 4})
    work.complete(4)
    assert work.settled

    done = queue.get(job.id)
    assert (done.state, done.winner_revision, done.error) == (JobState.DONE, 4, None)
    assert done.finished_at is not None
    assert done.finished_at >= running.started_at
    events = queue.events(job.id)
    assert [event.id for event in events] == [1, 2, 3, 4, 5]
    assert kinds(queue, job.id) == ["created", "started", "progress", "winner", "finished"]
    assert events[2].data["best_us"] == 12.5
    assert events[4].data["winner_revision"] == 4
    assert queue.events(job.id, after=3) == events[3:]
    assert queue.events(job.id, after=1, limit=2) == events[1:3]
    assert queue.lease("worker-1", ["h200"]) is None


def test_the_same_request_joins_the_job_that_waits_or_runs(queue: Queue) -> None:
    first, _ = queue.enqueue(PROBLEM)
    again, created = queue.enqueue(PROBLEM, priority=5)
    assert (again.id, created, again.priority) == (first.id, False, 5)
    assert queue.enqueue(PROBLEM, effort=Effort.QUICK)[1]
    assert queue.enqueue(PROBLEM, device="h20")[1]
    assert queue.enqueue(problem(1))[1]
    work = leased(queue)
    assert work.job.id == first.id
    assert queue.enqueue(PROBLEM)[0].id == first.id
    work.complete(1)
    assert queue.enqueue(PROBLEM)[0].id != first.id


def test_an_idempotency_key_gives_the_same_job_for_ever(queue: Queue) -> None:
    first, _ = queue.enqueue(PROBLEM, idempotency_key="a")
    assert queue.enqueue(PROBLEM, idempotency_key="b") == (first, False)
    leased(queue).complete(1)
    for key in ("a", "b"):
        again, created = queue.enqueue(PROBLEM, idempotency_key=key)
        assert (again.id, again.state, created) == (first.id, JobState.DONE, False)
    misused, created = queue.enqueue(problem(9), idempotency_key="a")
    assert (misused.problem, created) == (PROBLEM, False)
    assert queue.enqueue(PROBLEM, idempotency_key="c")[1]


def test_priority_then_first_come(queue: Queue) -> None:
    for m, priority in ((1, 0), (2, 5), (3, 0), (4, 5)):
        queue.enqueue(problem(m), priority=priority)
    assert [leased(queue).job.problem.m for _ in range(4)] == [2, 4, 1, 3]


def test_of_equal_priority_most_time_at_stake_goes_first(queue: Queue) -> None:
    for m, priority, calls, saving_us in (
        (1, 0, 0, 9.0),  # nobody says how often it is run
        (2, 0, 100, 0.5),
        (3, 0, 10, 6.0),
        (4, 0, 10**15, 0.0),  # tuned before
        (5, 1, 1, 0.1),
        (6, 0, 120, 0.5),
    ):
        queue.enqueue(problem(m), priority=priority, calls=calls, saving_us=saving_us)
    assert [leased(queue).job.problem.m for _ in range(6)] == [5, 3, 6, 2, 1, 4]


def test_calls_of_requests_that_join_add_up(queue: Queue) -> None:
    first, _ = queue.enqueue(problem(1), calls=10, saving_us=2.0)
    assert (first.calls, first.expected_saving_us) == (10, 20.0)
    queue.enqueue(problem(2), calls=15, saving_us=2.0)
    joined, _ = queue.enqueue(problem(1), calls=6, saving_us=2.5)
    assert (joined.id, joined.calls, joined.expected_saving_us) == (first.id, 16, 40.0)
    work = leased(queue)
    assert work.job.id == first.id, "it has overtaken the other one"
    assert queue.enqueue(problem(1), calls=4, saving_us=2.5)[0].calls == 20
    work.complete(1)
    assert queue.get(first.id).calls == 20
    anew, _ = queue.enqueue(problem(1), calls=1, saving_us=0.0)
    assert (anew.calls, anew.expected_saving_us) == (1, 0.0)
    assert queue.enqueue(problem(3), saving_us=1.0)[0].expected_saving_us is None


def test_an_idempotency_key_belongs_to_who_sent_it(queue: Queue) -> None:
    anns, _ = queue.enqueue(PROBLEM, ordered_by="ann", idempotency_key="a")
    bobs, created = queue.enqueue(problem(9), ordered_by="bob", idempotency_key="a")
    assert (created, bobs.problem) == (True, problem(9))
    nobodys, created = queue.enqueue(problem(10), idempotency_key="a")
    assert (created, nobodys.problem) == (True, problem(10))
    for owner, job in (("ann", anns), ("bob", bobs), (None, nobodys)):
        assert queue.enqueue(PROBLEM, ordered_by=owner, idempotency_key="a") == (job, False)


def test_an_idempotency_key_adds_its_calls_once(queue: Queue) -> None:
    first, _ = queue.enqueue(PROBLEM, calls=10, saving_us=2.0, idempotency_key="a")
    assert queue.enqueue(PROBLEM, calls=10, saving_us=3.0, idempotency_key="a") == (first, False)
    joined, _ = queue.enqueue(PROBLEM, calls=10, saving_us=2.0, idempotency_key="b")
    assert joined.calls == 20
    assert queue.enqueue(PROBLEM, calls=10, saving_us=2.0, idempotency_key="b")[0].calls == 20


def test_no_number_of_requests_overflows_the_calls(queue: Queue) -> None:
    queue.enqueue(PROBLEM, calls=10**18 - 1, saving_us=1.0)
    assert queue.enqueue(PROBLEM, calls=10**15, saving_us=1.0)[0].calls == 10**18
    assert leased(queue).job.expected_saving_us == 1e18


def test_calls_of_many_requests_at_once_all_count(queue: Queue) -> None:
    at_once(8, lambda i: queue.enqueue(PROBLEM, calls=1 + i))
    assert [job.calls for job in queue.list()] == [36]


def test_a_worker_gets_jobs_for_its_devices_only(queue: Queue) -> None:
    queue.enqueue(problem(1), device="h20")
    queue.enqueue(problem(2), device="h200", priority=-1)
    queue.enqueue(problem(3))
    assert [leased(queue).job.problem.m for _ in range(2)] == [3, 2]
    assert queue.lease("worker-1", ["h200"]) is None
    assert queue.lease("worker-2", ["h20"]) is not None


def test_jobs_are_listed_newest_first(queue: Queue) -> None:
    ids = [queue.enqueue(problem(m))[0].id for m in range(1, 6)]
    leased(queue).complete(1)
    listed = queue.list(limit=2)
    listed += queue.list(limit=10, after=listed[-1].id)
    assert [job.id for job in listed] == ids[::-1]
    assert [job.id for job in queue.list(JobState.DONE)] == ids[:1]
    assert queue.counts() == {
        JobState.WAITING: 4,
        JobState.RUNNING: 0,
        JobState.DONE: 1,
        JobState.FAILED: 0,
        JobState.CANCELLED: 0,
    }


def test_an_unknown_job(queue: Queue) -> None:
    for call in (queue.get, queue.cancel, queue.events):
        with pytest.raises(JobNotFound, match="no job nothing"):
            call("nothing")
    with pytest.raises(JobNotFound):
        queue.list(after="nothing")


def test_a_waiting_job_is_cancelled_at_once(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    assert queue.cancel(job.id).state is JobState.CANCELLED
    assert queue.cancel(job.id).state is JobState.CANCELLED
    assert kinds(queue, job.id) == ["created", "cancelled"]
    assert queue.lease("worker-1", []) is None
    assert queue.enqueue(PROBLEM)[1]


def test_a_running_job_is_told_to_stop(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    work = leased(queue)
    assert not work.heartbeat()
    asked = queue.cancel(job.id)
    assert (asked.state, asked.cancel_requested) == (JobState.RUNNING, True)
    assert queue.enqueue(PROBLEM)[1], "a new request must not join a job that is being stopped"
    assert not work.should_stop()
    assert work.heartbeat()
    assert work.stop_reason is StopReason.CANCELLED
    work.cancelled()
    assert queue.get(job.id).state is JobState.CANCELLED


def test_a_job_that_ended_cannot_be_cancelled(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    leased(queue).complete(1)
    cancelled = queue.cancel(job.id)
    assert (cancelled.state, cancelled.cancel_requested) == (JobState.DONE, False)


def test_a_dead_workers_job_is_taken_over_and_the_dead_one_is_fenced(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    zombie = leased(queue, "zombie", ttl_s=1.0)
    assert queue.lease("worker-2", []) is None
    time.sleep(1.1)
    heir = leased(queue, "worker-2")
    assert (heir.job.id, heir.job.attempt) == (job.id, 2)
    before = queue.get(job.id)
    writes = (
        zombie.heartbeat,
        lambda: zombie.progress("finals", 9, 9, 1.0, "wrong"),
        lambda: zombie.event("winner", {}),
        lambda: zombie.complete(99),
        lambda: zombie.fail("late", retry=False),
        zombie.cancelled,
        zombie.release,
    )
    for write in writes:
        with pytest.raises(LeaseLost, match="taken over"):
            write()
    assert zombie.stop_reason is StopReason.LOST
    assert queue.get(job.id) == before
    assert kinds(queue, job.id) == ["created", "started", "started"]
    heir.complete(1)
    assert queue.get(job.id).winner_revision == 1


def test_the_same_worker_is_fenced_from_its_own_earlier_attempt(queue: Queue) -> None:
    queue.enqueue(PROBLEM)
    first = leased(queue)
    first.release()
    second = leased(queue)
    with pytest.raises(LeaseLost):
        first.complete(1)
    second.complete(2)


def test_heartbeats_keep_a_lease_alive(queue: Queue) -> None:
    queue.enqueue(PROBLEM)
    work = leased(queue, ttl_s=1.0)
    for _ in range(8):
        time.sleep(0.1)
        work.heartbeat()
        assert queue.lease("worker-2", []) is None
    work.complete(1)


def test_a_late_worker_that_nobody_replaced_may_still_finish(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    work = leased(queue, ttl_s=0.01)
    time.sleep(0.05)
    work.complete(1)
    assert queue.get(job.id).state is JobState.DONE


def test_attempts_are_bounded_for_workers_that_die(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    for attempt in (1, 2, 3):
        assert leased(queue, ttl_s=0.01).job.attempt == attempt
        time.sleep(0.03)
    assert queue.lease("worker-9", []) is None
    failed = queue.get(job.id)
    assert failed.state is JobState.FAILED
    assert "gave up after 3 attempts" in (failed.error or "")
    assert kinds(queue, job.id)[-1] == "failed"
    assert queue.enqueue(PROBLEM)[1]


def test_attempts_are_bounded_for_failures(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    for _ in range(2):
        leased(queue).fail("no such luck", retry=True)
        waiting = queue.get(job.id)
        assert (waiting.state, waiting.error) == (JobState.WAITING, "no such luck")
    leased(queue).fail("no luck at all", retry=True)
    failed = queue.get(job.id)
    assert (failed.state, failed.error) == (JobState.FAILED, "no luck at all")


def test_a_hopeless_job_fails_at_once(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    leased(queue).fail("does not fit", retry=False)
    assert queue.get(job.id).state is JobState.FAILED


def test_a_retry_waits_a_little(store: Store) -> None:
    queue = Queue(store, retry_delay_s=0.4)
    queue.enqueue(PROBLEM)
    leased(queue).fail("broken", retry=True)
    assert queue.lease("worker-2", []) is None
    time.sleep(0.5)
    leased(queue).complete(1)


def test_handing_back_costs_no_attempt(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    for _ in range(5):
        leased(queue).release()
    work = leased(queue)
    assert work.job.attempt == 6
    work.fail("broken", retry=True)
    assert queue.get(job.id).state is JobState.WAITING


@pytest.mark.parametrize("ending", ["release", "fail", "death"])
def test_a_cancelled_job_never_runs_again(queue: Queue, ending: str) -> None:
    job, _ = queue.enqueue(PROBLEM)
    work = leased(queue, ttl_s=1.0)
    queue.cancel(job.id)
    if ending == "release":
        work.release()
    elif ending == "fail":
        work.fail("broken", retry=True)
    else:
        time.sleep(1.1)
    assert queue.lease("worker-2", []) is None
    assert queue.get(job.id).state is JobState.CANCELLED


def test_cancelling_an_abandoned_job_does_not_wait_for_a_worker(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    leased(queue, ttl_s=0.01)
    time.sleep(0.05)
    assert queue.cancel(job.id).state is JobState.CANCELLED


def test_many_requests_at_once_make_one_job(queue: Queue) -> None:
    answers = at_once(8, lambda i: queue.enqueue(PROBLEM, idempotency_key=f"key-{i % 2}"))
    assert len({job.id for job, _ in answers}) == 1
    assert [created for _, created in answers].count(True) == 1


def test_events_written_at_once_have_no_gaps(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    work = leased(queue)

    def report(_: int) -> None:
        for done in range(20):
            work.progress("screen", done, 20)

    at_once(4, report)
    assert [event.id for event in queue.events(job.id)] == list(range(1, 83))


def set_clock_back(store: Store, seconds: float = 3600.0) -> None:
    """To the rows of jobs it is the same whether the clock goes back or their times go forward."""
    with store.database.write() as session:
        shift = "UPDATE jobs SET available_at = available_at + :s, lease_expires_at = "
        session.execute(text(shift + "lease_expires_at + :s"), {"s": seconds})


def test_a_clock_that_was_set_back_holds_nobody_up(queue: Queue, store: Store) -> None:
    """Neither a waiting job nor one whose worker has died is out of reach for an hour."""
    waiting, _ = queue.enqueue(PROBLEM)
    set_clock_back(store)
    dead = leased(queue)
    assert dead.job.id == waiting.id
    set_clock_back(store)
    heir = leased(queue, "worker-2")
    assert (heir.job.id, heir.job.attempt) == (waiting.id, 2)
    with pytest.raises(LeaseLost):
        dead.complete(1)
    set_clock_back(store)
    heir.heartbeat()  # alive: from now on by the clock as it is
    assert queue.lease("worker-3", ["h200"]) is None
    heir.complete(1)
    assert queue.get(waiting.id).state is JobState.DONE


def test_a_lease_is_no_longer_than_what_is_taken_for_a_wrong_clock(queue: Queue) -> None:
    queue.enqueue(PROBLEM)
    with pytest.raises(ValueError, match="longer than 900 s"):
        queue.lease("worker-1", ["h200"], ttl_s=901.0)
