"""What becomes of a job, depending on how its tuning ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import text

from gemmsmith.core.tuning import JobState
from gemmsmith.errors import InvalidProblem
from tests.support.records import PROBLEM
from tuner.errors import DoesNotFit, JobAborted, LeaseLost, NotRecorded, StoreError
from tuner.jobs import Job, LeasedJob, Queue, StopReason, Worker
from tuner.jobs.worker import Tune
from tuner.store import Store


@pytest.fixture
def queue(sqlite_url: str) -> Queue:
    return Queue(Store.open(sqlite_url), max_attempts=2, retry_delay_s=0.0)


def run(queue: Queue, tune: Tune, **options: float) -> Job:
    job, _ = queue.enqueue(PROBLEM)
    Worker(queue, tune, devices=[], **options).run(until_idle=True)  # type: ignore[arg-type]
    return queue.get(job.id)


def raising(error: BaseException) -> Tune:
    def tune(leased: LeasedJob) -> int:
        raise error

    return tune


def test_a_revision_completes_the_job(queue: Queue) -> None:
    done = run(queue, lambda leased: 3)
    assert (done.state, done.winner_revision) == (JobState.DONE, 3)


def test_tuning_may_settle_the_job_itself(queue: Queue) -> None:
    done = run(queue, lambda leased: leased.complete(5))
    assert (done.state, done.winner_revision, done.attempt) == (JobState.DONE, 5, 1)


@pytest.mark.parametrize(
    "error",
    [
        DoesNotFit("too large: use a smaller batch"),
        NotRecorded("the recording holds 12 problems"),
        InvalidProblem("k", "k must be even"),
    ],
)
def test_a_hopeless_failure_is_not_tried_again(queue: Queue, error: Exception) -> None:
    failed = run(queue, raising(error))
    assert (failed.state, failed.attempt, failed.error) == (JobState.FAILED, 1, str(error))


@pytest.mark.parametrize("error", [RuntimeError("the driver has gone"), StoreError("disk gone")])
def test_other_failures_are_tried_again_while_attempts_last(queue: Queue, error: Exception) -> None:
    failed = run(queue, raising(error))
    assert (failed.state, failed.attempt) == (JobState.FAILED, 2)
    assert str(error) in (failed.error or "")


def test_a_second_attempt_may_succeed(queue: Queue) -> None:
    def tune(leased: LeasedJob) -> int:
        if leased.job.attempt == 1:
            raise OSError("no luck")
        return 1

    done = run(queue, tune)
    assert (done.state, done.attempt, done.error) == (JobState.DONE, 2, None)


def test_a_lost_lease_is_left_alone(queue: Queue) -> None:
    """The worker stops quietly, whatever the other one has made of the job."""

    def tune(leased: LeasedJob) -> int:
        with queue._database.write() as session:
            session.execute(text("UPDATE jobs SET lease_expires_at = 0"))
        heir = queue.lease("another", [])
        assert heir is not None
        heir.complete(1)
        raise ValueError("all is lost")

    done = run(queue, tune)
    assert (done.state, done.winner_revision, done.error) == (JobState.DONE, 1, None)


def test_heartbeats_keep_a_long_job_and_report_its_cancellation(queue: Queue) -> None:
    seen: list[StopReason | None] = []

    def tune(leased: LeasedJob) -> int:
        time.sleep(0.6)
        assert queue.lease("another", []) is None
        queue.cancel(leased.job.id)
        deadline = time.monotonic() + 10
        while not leased.should_stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(leased.stop_reason)
        raise JobAborted("stopped")

    assert run(queue, tune, ttl_s=0.3).state is JobState.CANCELLED
    assert seen == [StopReason.CANCELLED]


def test_a_lease_that_is_taken_away_stops_the_tuning(queue: Queue) -> None:
    def tune(leased: LeasedJob) -> int:
        leased.complete(8)
        for _ in range(500):
            if leased.stop_reason is StopReason.LOST:
                raise LeaseLost("as expected")
            time.sleep(0.01)
        pytest.fail("nobody noticed")

    assert run(queue, tune, ttl_s=0.15).winner_revision == 8


def test_aborting_for_no_reason_is_a_failure(queue: Queue) -> None:
    assert run(queue, raising(JobAborted("just so"))).error == "just so"


@pytest.mark.parametrize("returns", [True, False])
def test_stopping_hands_the_job_back(queue: Queue, returns: bool) -> None:
    workers: list[Worker] = []

    def tune(leased: LeasedJob) -> int | None:
        workers[0].stop()
        assert leased.should_stop()
        if returns:
            return None
        raise JobAborted("stopped")

    job, _ = queue.enqueue(PROBLEM)
    workers.append(Worker(queue, tune, devices=[]))
    assert workers[0].run() == 1
    assert queue.get(job.id).state is JobState.WAITING
    assert queue.events(job.id)[-1].kind == "requeued"


def test_a_job_finished_while_stopping_is_done(queue: Queue) -> None:
    workers: list[Worker] = []

    def tune(leased: LeasedJob) -> int:
        workers[0].stop()
        return 4

    job, _ = queue.enqueue(PROBLEM)
    workers.append(Worker(queue, tune, devices=[]))
    workers[0].run()
    assert queue.get(job.id).winner_revision == 4


def test_an_interrupt_hands_the_job_back_and_goes_on(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    with pytest.raises(SystemExit):
        Worker(queue, raising(SystemExit(1)), devices=[]).run()
    assert queue.get(job.id).state is JobState.WAITING


def test_an_idle_worker_ends_on_a_signal_and_restores_the_handlers(queue: Queue) -> None:
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM])
    timer.start()
    assert Worker(queue, lambda leased: 1, devices=[], poll_s=30.0).run() == 0
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_worker_outlives_a_database_that_is_away(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: Callable[..., LeasedJob | None] = queue.lease
    calls: list[float] = []

    def lease(*args: object) -> LeasedJob | None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise StoreError("cannot reach it")
        return working(*args)

    monkeypatch.setattr(queue, "lease", lease)
    workers: list[Worker] = []

    def tune(leased: LeasedJob) -> int:
        workers[0].stop()
        return 2

    job, _ = queue.enqueue(PROBLEM)
    workers.append(Worker(queue, tune, devices=[], poll_s=0.01))
    workers[0].run()
    assert queue.get(job.id).state is JobState.DONE
    assert calls[1] - calls[0] >= 1.0
