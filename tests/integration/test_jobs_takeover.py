"""Workers that are killed, told to end, cancelled, or race each other: real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import pytest

from gemmsmith.core.tuning import JobState
from tests.support.records import PROBLEM
from tests.support.replacing import replace
from tests.support.slow_worker import CANDIDATES
from tuner.jobs import LeasedJob, Queue, Worker
from tuner.store import Store

PATIENCE_S = 60.0


@contextmanager
def worker(url: str, ttl_s: float = 1.5) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.slow_worker", url, str(ttl_s)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def said(process: subprocess.Popen[str], lines: int) -> list[str]:
    assert process.stdout is not None
    reports = (line.strip() for line in process.stdout if line.startswith("added"))
    return list(islice(reports, lines))


def test_another_worker_takes_over_from_a_killed_one(store: Store, store_url: str) -> None:
    queue = Queue(store)
    job, _ = queue.enqueue(PROBLEM)
    with worker(store_url) as first:
        assert said(first, 4) == [f"added {n}" for n in range(4)]
        first.send_signal(signal.SIGKILL)
        first.wait()
        rest = first.stdout.read().split("\n") if first.stdout else []
    before = len(store.trials(job=job.id))
    assert before >= 4 + sum(line.startswith("added") for line in rest), "what it said is durable"
    assert queue.get(job.id).state is JobState.RUNNING

    with worker(store_url) as second:
        assert said(second, 1) == [f"added {before}"], "it goes on where the first one stopped"
        wait_for(lambda: queue.get(job.id).state.terminal)
    done = queue.get(job.id)
    assert (done.state, done.attempt, done.winner_revision) == (JobState.DONE, 2, 7)
    names = [stored.trial.candidate.kernel.name for stored in store.trials(job=job.id)]
    assert names == [f"kernel_{n}" for n in range(CANDIDATES)]
    owners = [e.data["owner"] for e in queue.events(job.id) if e.kind == "started"]
    assert len(set(owners)) == 2


@pytest.mark.long
def test_a_frozen_worker_that_wakes_up_late_changes_nothing(store: Store, store_url: str) -> None:
    """SIGSTOP is what a suspended machine looks like: it comes back believing it owns the job."""
    queue = Queue(store)
    job, _ = queue.enqueue(PROBLEM)
    with worker(store_url, ttl_s=0.9) as zombie:
        assert said(zombie, 2) == ["added 0", "added 1"]
        zombie.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        with worker(store_url) as heir:
            wait_for(lambda: queue.get(job.id).state.terminal)
            done = queue.get(job.id)
            events = queue.events(job.id)
            heir.send_signal(signal.SIGTERM)
            heir.wait()
            zombie.send_signal(signal.SIGCONT)
            fresh, _ = queue.enqueue(replace(PROBLEM, m=1))
            # It has noticed, and is of use again.
            wait_for(lambda: queue.get(fresh.id).state is JobState.DONE)
    assert queue.get(job.id) == done
    assert queue.events(job.id) == events
    assert (done.state, done.attempt) == (JobState.DONE, 2)
    assert len(store.trials(job=job.id)) == CANDIDATES


def test_sigterm_hands_the_job_back_between_candidates(store: Store, store_url: str) -> None:
    queue = Queue(store)
    job, _ = queue.enqueue(PROBLEM)
    with worker(store_url, ttl_s=60.0) as first:
        said(first, 2)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=PATIENCE_S) == 0
        assert first.stdout is not None
        assert first.stdout.read().strip().endswith("ended")
    waiting = queue.get(job.id)
    assert (waiting.state, waiting.error) == (JobState.WAITING, None)
    with worker(store_url, ttl_s=60.0):
        wait_for(lambda: queue.get(job.id).state is JobState.DONE)
    assert len(store.trials(job=job.id)) == CANDIDATES


def test_cancellation_reaches_a_worker_between_candidates(store: Store, store_url: str) -> None:
    queue = Queue(store)
    job, _ = queue.enqueue(PROBLEM)
    with worker(store_url) as process:
        said(process, 2)
        assert queue.cancel(job.id).state is JobState.RUNNING
        wait_for(lambda: queue.get(job.id).state.terminal)
    cancelled = queue.get(job.id)
    assert cancelled.state is JobState.CANCELLED
    assert 2 <= len(store.trials(job=job.id)) < CANDIDATES
    assert queue.events(job.id)[-1].kind == "cancelled"


def test_two_workers_run_each_of_fifty_jobs_once(store: Store, store_url: str) -> None:
    queue = Queue(store)
    jobs = [queue.enqueue(replace(PROBLEM, m=m))[0] for m in range(1, 51)]
    ran: list[tuple[str, int]] = []

    def race(number: int) -> None:
        with Store.open(store_url) as own:

            def tune(leased: LeasedJob) -> int:
                ran.append((leased.job.id, number))
                time.sleep(0.005)
                return 1

            Worker(Queue(own), tune, devices=[]).run(until_idle=True)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(job_id for job_id, _ in ran) == {job.id: 1 for job in jobs}
    assert {number for _, number in ran} == {0, 1}
    assert queue.counts()[JobState.DONE] == 50
    assert all(queue.get(job.id).attempt == 1 for job in jobs)
