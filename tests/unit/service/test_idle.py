"""A worker without orders: it reports its GPU and re-checks what is stale; orders go first."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from sqlalchemy import update

from gemmsmith.answers.answer import Ratio
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from service.settings import Settings
from service.worker import idle, process
from service.worker.process import Tuning
from tests.support.gpu import NEWER, Gpu
from tests.support.present import present
from tests.support.processes import until
from tests.support.recordings import best_of, record, some_candidates
from tests.support.records import imported
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings
from tests.support.serving import winner as winner_of
from tuner.devices.base import Contender
from tuner.errors import DeviceError
from tuner.jobs import Queue, Worker
from tuner.jobs.rechecks import IDLE_PRIORITY
from tuner.measure.policy import Policy
from tuner.merge import settle
from tuner.store import Store
from tuner.store.models import JobRow
from tuner.trial import Finals

STALE = Problem(m=256, n=4096, k=4096)
ORDERED = Problem(m=512, n=4096, k=4096)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(tmp_path)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database) as opened:
        opened.promote(replace(winner_of(STALE), candidate=best_of(STALE)))
        yield opened


@contextmanager
def working(settings: Settings, store: Store, device: Gpu) -> Iterator[None]:
    """A worker in a thread, as `service.worker.process.run` sets it up."""
    tuning = Tuning(settings, store, device)
    tuning.begin()
    loop = Worker(
        Queue(store), tuning, devices=[H200.slug, "cuda:0"], poll_s=0.02, on_idle=tuning.idle
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join()
        tuning.close()


def served(store: Store, problem: Problem = STALE) -> tuple[int, bool] | None:
    stored = store.winner(problem, H200.slug)
    return None if stored is None else (stored.revision, stored.stale)


def test_an_idle_worker_reports_its_gpu_and_measures_stale_winners_again(
    settings: Settings, store: Store
) -> None:
    assert served(store) == (1, False)  # no GPU has reported
    gpu = Gpu(settings.sweeps, STALE)
    with working(settings, store, gpu):
        until(lambda: served(store) == (2, False), "the winner stays stale")
        until(lambda: Queue(store).list()[0].state is JobState.DONE, "the job does not end")
    assert [(known.uuid, known.environment) for known in store.gpus.known()] == [("GPU-0", NEWER)]
    (job,) = Queue(store).list()
    assert (job.effort, job.priority, job.problem) == (Effort.RECHECK, IDLE_PRIORITY, STALE)
    assert (gpu.screened, len(gpu.finalists)) == ([], 1)
    winner = present(store.winner(STALE, H200.slug))
    assert (winner.candidate, winner.environment, winner.job) == (best_of(STALE), NEWER, job.id)


class Failing(Gpu):
    """A GPU whose finals fail."""

    def finals(self, problem: Problem, contenders: Sequence[Contender], policy: Policy) -> Finals:
        super().finals(problem, contenders, policy)
        raise DeviceError("fell off the bus")


def test_a_failed_re_check_is_not_ordered_in_a_loop(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LOOK_EVERY_S", 0.0)
    gpu = Failing(settings.sweeps, STALE)
    looks: list[object] = []
    order = idle.Rechecks.order
    monkeypatch.setattr(idle.Rechecks, "order", lambda self: looks.append(order(self)))
    store.gpus.report(H200, NEWER)
    job, _ = Queue(store, max_attempts=1).enqueue(STALE, effort=Effort.RECHECK, device=H200.slug)
    with working(settings, store, gpu):
        until(lambda: len(looks) > 3, "the worker does not look for work")
    assert [found.id for found in Queue(store).list()] == [job.id]
    assert Queue(store).get(job.id).state is JobState.FAILED
    assert "fell off the bus" in (Queue(store).get(job.id).error or "")
    assert looks == [None] * len(looks)
    assert served(store) == (1, True)  # still served


class Interrupted(Gpu):
    """A GPU whose owner orders something while it begins a re-check."""

    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder, STALE, ORDERED)
        self._store = store
        self.begun: list[Problem] = []

    def baseline_kernels(self, problem: Problem) -> tuple[str, ...]:
        if not self.begun:
            Queue(self._store).enqueue(ORDERED, effort=Effort.QUICK)
        self.begun.append(problem)
        return ()


def test_a_re_check_gives_way_to_an_order_and_goes_on_after_it(
    settings: Settings, store: Store
) -> None:
    gpu = Interrupted(settings.sweeps, store)
    with working(settings, store, gpu):
        until(lambda: served(store) == (2, False), "the winner stays stale")
    assert gpu.begun == [STALE, ORDERED, STALE]
    assert len(gpu.finalists) == 2
    assert served(store, ORDERED) == (1, False)
    first = Queue(store).list()[-1]
    assert first.problem == STALE
    events = [(e.kind, e.data.get("reason")) for e in Queue(store).events(first.id)]
    assert ("requeued", "put off: a request goes first") in events


def test_a_pinned_winner_is_served_as_it_is_and_left_alone(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LOOK_EVERY_S", 0.0)
    store.pin(STALE, H200.slug, 1)
    Queue(store).enqueue(STALE, effort=Effort.RECHECK)  # by somebody who wants to know
    with working(settings, store, Gpu(settings.sweeps, STALE)):
        until(lambda: len(store.history(STALE, H200.slug)) == 2, "it is not measured")
        until(lambda: Queue(store).list()[0].state is JobState.DONE, "the job does not end")
    assert served(store) == (1, True)
    assert len(Queue(store).list()) == 1
    assert store.unpin(STALE, H200.slug).winner.revision == 2


def test_a_recorded_gpu_reports_nothing_and_re_checks_nothing(
    settings: Settings, store: Store
) -> None:
    record(settings.sweeps, STALE)
    store.gpus.report(H200, replace(NEWER, gpu_uuid="GPU-elsewhere"))
    with Store.open(settings.database) as opened:
        replaying = process.open_worker_device(
            settings.model_copy(update={"device": "replay:h200"})
        )
        tuning = Tuning(settings, opened, replaying)
        tuning.begin()
        tuning.idle()
        tuning.close()
    assert [known.uuid for known in store.gpus.known()] == ["GPU-elsewhere"]
    assert Queue(store).list() == []
    assert served(store) == (1, True)


def test_a_gpu_that_cannot_be_asked_is_no_reason_to_end(settings: Settings, store: Store) -> None:
    class Silent(Gpu):
        def __enter__(self) -> Gpu:
            raise DeviceError("the measuring process does not start")

    with structlog.testing.capture_logs() as logged:
        tuning = Tuning(settings, store, Silent(settings.sweeps, STALE))
        tuning.begin()
    assert [entry["event"] for entry in logged] == ["gpu_not_reported"]
    assert store.gpus.known() == []


def test_a_dispute_is_settled_by_a_third_gpu(settings: Settings, store: Store) -> None:
    def work(number: int) -> Gpu:
        gpu = Gpu(settings.sweeps, STALE)
        gpu._environment = replace(NEWER, gpu_uuid=f"GPU-{number}")
        tuning = Tuning(settings, store, gpu)
        tuning.begin()
        Worker(Queue(store), tuning, devices=[H200.slug]).run(until_idle=True)
        tuning.close()
        return gpu

    # GPU-0 and that of another site have found other winners, 20% apart.
    store.promote(replace(winner_of(STALE), candidate=best_of(STALE), environment=NEWER))
    other = replace(
        winner_of(STALE),
        candidate=some_candidates(STALE)[3],
        environment=replace(NEWER, gpu_uuid="GPU-9"),
        speedup=Ratio(median=1.3, ci_low=1.29, ci_high=1.31),
    )
    imported(store, other)
    store.gpus.report(H200, replace(NEWER, gpu_uuid="GPU-1"))
    _, (job,) = settle(store, Queue(store), [other])

    assert work(0).finalists == []
    assert Queue(store).get(job.id).state is JobState.WAITING
    assert "party to the dispute" in str(Queue(store).events(job.id)[-1].data)
    with store.database.write() as session:
        session.execute(update(JobRow).values(available_at=0.0))  # the pause is over
    assert work(1).finalists == [[best_of(STALE), some_candidates(STALE)[3]]]
    winner = present(store.winner(STALE, H200.slug))
    assert (winner.environment.gpu_uuid, winner.job) == ("GPU-1", job.id)


def test_without_a_third_gpu_a_party_to_the_dispute_measures(
    settings: Settings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "is_for_a_third", lambda *_: True)
    monkeypatch.setattr(process, "THIRD_LOOKS_S", 0.0)
    gpu = Gpu(settings.sweeps, STALE)
    tuning = Tuning(settings, store, gpu)
    job, _ = Queue(store).enqueue(STALE, effort=Effort.RECHECK, device=H200.slug)
    Worker(Queue(store), tuning, devices=[H200.slug]).run(until_idle=True)
    tuning.close()
    ended = Queue(store).get(job.id)
    assert (ended.state, ended.attempt) == (JobState.DONE, process.THIRD_WITHIN + 1)
    assert len(gpu.finalists) == 1
