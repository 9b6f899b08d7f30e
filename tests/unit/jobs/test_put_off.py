"""A job that has a first winner is handed back while jobs without one wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmsmith.core.tuning import JobState
from service.settings import Settings
from service.worker.process import Tuning
from tests.support.queues import leased
from tests.support.recordings import best_of, record, some_candidates
from tests.support.records import PROBLEM
from tests.support.replacing import replace
from tests.unit.search.test_run import Compiling
from tests.unit.search.test_together import LARGE, SMALL, build, builder_in
from tuner.devices import open_device
from tuner.devices.base import Device
from tuner.jobs import Queue, Worker
from tuner.store import Store

OTHER = replace(PROBLEM, m=PROBLEM.m + 1)


@pytest.fixture
def queue(store: Store) -> Queue:
    return Queue(store)


def test_the_others_go_first_and_it_does_not_wait_for_them_twice(queue: Queue) -> None:
    first, _ = queue.enqueue(PROBLEM, calls=1000, saving_us=10.0)
    second, _ = queue.enqueue(OTHER)
    mine = leased(queue)
    assert mine.job.id == first.id
    assert mine.put_off([])
    assert mine.settled
    waiting = queue.get(first.id)
    assert (waiting.state, waiting.phase) == (JobState.WAITING, "answered")
    theirs = leased(queue)
    assert theirs.job.id == second.id
    assert not theirs.put_off([])
    theirs.complete(1)
    again = leased(queue)
    assert again.job.id == first.id
    assert not again.put_off([])


def test_many_attempts_are_left_to_a_job_that_was_put_off(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    for i in range(10):
        queue.enqueue(replace(OTHER, n=PROBLEM.n + i))
    while (mine := leased(queue)).put_off([]):
        pass
    assert mine.job.id == queue.enqueue(replace(OTHER, n=PROBLEM.n + 9))[0].id
    assert leased(queue).job.id == job.id


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"deadline_s": 60}, {}),
        ({"priority": 1}, {"priority": 0}),
        ({}, {"device": "another-gpu"}),
    ],
)
def test_a_job_goes_on_if_it_cannot_wait_or_no_other_may_go_first(
    queue: Queue, mine: dict[str, object], theirs: dict[str, object]
) -> None:
    queue.enqueue(PROBLEM, device="this-gpu", **mine)  # type: ignore[arg-type]
    queue.enqueue(OTHER, **{"device": "this-gpu", **theirs})  # type: ignore[arg-type]
    job = queue.lease("worker", ["this-gpu"])
    assert job is not None
    assert job.job.problem == PROBLEM
    assert not job.put_off(["this-gpu"])
    assert not job.settled


def test_a_job_that_is_cancelled_meanwhile_ends(queue: Queue) -> None:
    job, _ = queue.enqueue(PROBLEM)
    queue.enqueue(OTHER)
    mine = leased(queue)
    queue.cancel(job.id)
    assert mine.put_off([])
    assert queue.get(job.id).state is JobState.CANCELLED


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    record(tmp_path / "sweeps", SMALL, LARGE)
    with open_device("replay:h200", sweeps=tmp_path / "sweeps") as opened:
        yield Compiling(opened)  # type: ignore[misc]


class Entered:
    """A device that its test has entered already."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __enter__(self) -> Entered:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_worker_answers_all_jobs_before_it_compiles_for_one(
    device: Device, store: Store, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = builder_in(tmp_path)
    builder.report = lambda _: None  # type: ignore[attr-defined]
    for problem in (SMALL, LARGE):
        build(builder, problem, but_best=True)
    monkeypatch.setattr(Tuning, "_find_builder", lambda *_: builder)
    tuning = Tuning(Settings(), store, Entered(device))  # type: ignore[arg-type]
    jobs = [queue.enqueue(problem)[0].id for problem in (SMALL, LARGE)]
    worker = Worker(queue, tuning, devices=[], owner="worker")
    assert worker.run(until_idle=True) == 3
    assert [queue.get(job).state for job in jobs] == [JobState.DONE] * 2
    screened: list[str] = device.screened  # type: ignore[attr-defined]
    of_large = {candidate.key for candidate in some_candidates(LARGE)}
    first_of_large = next(i for i, key in enumerate(screened) if key in of_large)
    assert first_of_large < screened.index(best_of(SMALL).key)
    for problem in (SMALL, LARGE):
        winner = store.winner(problem, device.model.slug)
        assert winner is not None
        assert winner.candidate == best_of(problem)
