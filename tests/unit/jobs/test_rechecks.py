"""Which stale winners an idle worker has measured again, and when, on each database."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from sqlalchemy import update

from gemmsmith.core.tuning import Effort, JobState
from tests.support.queues import problem
from tests.support.records import DEVICE, ENVIRONMENT, OTHER_DEVICE, PROBLEM, imported, winner
from tuner.jobs import Job, LeasedJob, Queue
from tuner.jobs.rechecks import AGAIN_S, IDLE_PRIORITY, Rechecks
from tuner.store import Store
from tuner.store.models import JobRow

H200 = DEVICE.slug
NEWER = replace(ENVIRONMENT, cublas="14.0")


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store, retry_delay_s=0.0)


@pytest.fixture
def rechecks(store: Store, queue: Queue) -> Rechecks:
    """Re-checks on a GPU that runs newer software."""
    store.gpus.report(DEVICE, NEWER)
    return Rechecks(store, queue, H200, "cuda:0")


def ordered(rechecks: Rechecks) -> Job:
    job = rechecks.order()
    assert job is not None
    assert (job.effort, job.device, job.priority) == (Effort.RECHECK, H200, IDLE_PRIORITY)
    return job


def leased(queue: Queue) -> LeasedJob:
    taken = queue.lease("worker", [H200, "cuda:0"])
    assert taken is not None
    return taken


def end_all(store: Store, ago_s: float) -> None:
    with store.database.write() as session:
        session.execute(
            update(JobRow).values(
                state=JobState.FAILED.value, active_key=None, finished_at=time.time() - ago_s
            )
        )


def test_only_stale_winners_of_the_worker_s_model_that_nobody_has_pinned(
    rechecks: Rechecks, store: Store
) -> None:
    store.promote(replace(winner(problem(1)), environment=NEWER))
    store.promote(replace(winner(problem(2)), replayed=True))
    store.promote(replace(winner(problem(3)), device=OTHER_DEVICE))
    store.promote(winner(problem(4)))
    store.pin(problem(4), H200, 1)
    assert rechecks.order() is None
    assert Rechecks(store, Queue(store), OTHER_DEVICE.slug, "cuda:1").order() is None
    assert Rechecks(store, Queue(store), "unheard-of", "cuda:1").order() is None
    imported(store, winner(problem(5)))
    assert ordered(rechecks).problem == problem(5)


def test_most_time_at_stake_goes_first_then_the_oldest(
    rechecks: Rechecks, store: Store, queue: Queue
) -> None:
    for m, us in ((1, 10.0), (2, 10.0), (3, 50.0), (4, 10.0)):
        store.promote(winner(problem(m), time=us))
    for m, calls in ((3, 10), (2, 30), (2, 30)):  # 500 and 600 µs
        queue.enqueue(problem(m), device="elsewhere", calls=calls)
        leased_job = queue.lease("other", ["elsewhere"])
        assert leased_job is not None
        leased_job.complete(1)
    assert [ordered(rechecks).problem.m for _ in range(4)] == [2, 3, 1, 4]
    assert rechecks.order() is None  # all of them wait


@pytest.mark.parametrize("device", ["", H200, "cuda:0"])
def test_what_will_be_tuned_anyhow_is_left_alone(
    rechecks: Rechecks, store: Store, queue: Queue, device: str
) -> None:
    store.promote(winner())
    queue.enqueue(PROBLEM, device=device)
    assert rechecks.order() is None
    job = leased(queue)
    assert rechecks.order() is None
    job.complete(1)
    ordered(rechecks)


def test_after_a_re_check_has_failed_there_is_a_day_s_peace(
    rechecks: Rechecks, store: Store, queue: Queue
) -> None:
    store.promote(winner())
    ordered(rechecks)
    leased(queue).fail("no room on the GPU", retry=False)
    assert rechecks.order() is None
    end_all(store, AGAIN_S - 60)
    assert rechecks.order() is None
    end_all(store, AGAIN_S + 60)
    ordered(rechecks)


def test_an_order_goes_first_and_a_re_check_gives_way_to_it(
    rechecks: Rechecks, store: Store, queue: Queue
) -> None:
    store.promote(winner())
    ordered(rechecks)
    queue.enqueue(problem(7), priority=-100)
    order = leased(queue)
    assert order.job.problem == problem(7)
    queue.enqueue(problem(8), priority=100)
    assert not rechecks.outranked(order.job)  # only idle work gives way
    order.complete(1)
    leased(queue).complete(1)
    idle = leased(queue)
    assert not rechecks.outranked(idle.job)
    queue.enqueue(problem(9), device="elsewhere")
    assert not rechecks.outranked(idle.job)
    queue.enqueue(problem(9), priority=-100)
    assert rechecks.outranked(idle.job)
    queue.enqueue(PROBLEM, effort=Effort.RECHECK, device=H200)  # it is an order itself now
    assert not rechecks.outranked(idle.job)


def test_two_workers_share_what_is_stale(store: Store, rechecks: Rechecks) -> None:
    for m in (1, 2):
        store.promote(winner(problem(m)))
    other = Rechecks(store, Queue(store), H200, "cuda:1")
    assert {ordered(rechecks).problem, ordered(other).problem} == {problem(1), problem(2)}
    assert rechecks.order() is None
