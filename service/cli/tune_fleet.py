"""`gemmsmith tune --fleet`: order jobs in the database for a fleet's GPUs, and follow them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gemmsmith.device import DeviceModel
from gemmsmith.tuning import Effort, JobState
from service.cli.output import CommandError, emit, note, say
from service.cli.progress import Reporter, reporter
from service.cli.session import StopFlag, say_made
from service.cli.tasks import Status, Task, TaskOutcome, report

if TYPE_CHECKING:
    from service.settings import Settings
    from tuner.jobs import Job, Queue
    from tuner.store import Store

_LOOK_S = 0.5


def run(
    settings: Settings,
    tasks: Sequence[Task],
    *,
    effort: Effort,
    priority: int,
    deadline_s: int | None,
    skip_current: bool,
    wait: bool,
    as_json: bool,
    whole: bool,
) -> int:
    """Order every task, the longest first, and follow them to their end; the exit status.

    Where tasks say how often they are run, the queue puts those first in which most time is at
    stake. Interrupting this leaves the jobs: they go on.

    Raises:
        StoreError: the database cannot be used.
        CommandError: it knows no such device model.
    """
    from service.database import open_store
    from tuner.jobs import Queue

    began = time.monotonic()
    with open_store(settings, on_made=say_made) as store:
        model = _model(store, settings.device)
        outcomes, ordered = [], []
        queue = Queue(store, limit=settings.queue_limit)
        for task in longest_first(tasks, model):
            if skip_current and (outcome := _current(store, task, model)) is not None:
                outcomes.append(outcome)
            else:
                job = _order(store, queue, task, model, effort, priority, deadline_s)
                ordered.append((task, job))
        if not wait:
            if as_json:
                emit({"jobs": [{"id": job.id, "state": job.state} for _, job in ordered]})
            else:
                for task, job in ordered:
                    say(f"{job.id}  {job.state}  {task.problem}")
            return 0
        with StopFlag() as stop, reporter() as says:
            for outcome in _follow(store, queue, ordered, stop, says):
                outcomes.append(outcome)
                if whole:
                    says.line(f"  {outcome.line()}")
            if stop():
                note("the remaining jobs go on: gemmsmith jobs list")
    return report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)


def longest_first(tasks: Sequence[Task], model: DeviceModel | None) -> list[Task]:
    """The tasks by how long one launch takes, by the cost model's roofline: tuning goes with it.

    So no long one is begun when all the other GPUs have run out of work.
    """
    from tuner.search.demand import roofline_us

    return sorted(tasks, key=lambda task: roofline_us(task.problem, model), reverse=True)


def _model(store: Store, device: str) -> DeviceModel | None:
    """The device model the jobs are for; None: whichever GPU is free."""
    if not device:
        return None
    known = store.devices()
    slug = device.removeprefix("replay:")
    for model in known:
        if slug in (model.slug, model.name):
            return model
    raise CommandError(
        f"no device model {device!r} in the database; it has "
        f"{', '.join(model.slug for model in known) or 'none'}. Without --device any GPU of the "
        "fleet takes the jobs"
    )


def _order(
    store: Store,
    queue: Queue,
    task: Task,
    model: DeviceModel | None,
    effort: Effort,
    priority: int,
    deadline_s: int | None,
) -> Job:
    from tuner.search import demand

    saving = demand.estimate(store, task.problem, model) if task.calls else 0.0
    job, _ = queue.enqueue(
        task.problem,
        effort=effort,
        device=model.slug if model is not None else "",
        priority=priority,
        calls=task.calls,
        saving_us=saving,
        deadline_s=deadline_s,
    )
    return job


def _current(store: Store, task: Task, model: DeviceModel | None) -> TaskOutcome | None:
    """What came of a task that needs no tuning: a winner was measured by the software in use."""
    winner = None if model is None else store.winner(task.problem, model.slug)
    if winner is None or winner.stale or winner.replayed or not winner.job:
        return None
    return TaskOutcome(task=task, status=Status.CURRENT, result=winner)


def _follow(
    store: Store,
    queue: Queue,
    ordered: Sequence[tuple[Task, Job]],
    stop: StopFlag,
    says: Reporter,
) -> Iterator[TaskOutcome]:
    """What came of each job, as they end; until told to stop."""
    began = time.monotonic()
    left = dict(enumerate(ordered))
    while left and not stop():
        for number, (task, job) in list(left.items()):
            now = queue.get(job.id)
            if not now.state.terminal:
                continue
            del left[number]
            says.overall(len(ordered) - len(left) - 1, len(ordered), str(task.problem))
            yield _outcome(store, queue, task, now, time.monotonic() - began)
        if left:
            time.sleep(_LOOK_S)


def _outcome(store: Store, queue: Queue, task: Task, job: Job, seconds: float) -> TaskOutcome:
    if job.state is not JobState.DONE:
        error = job.error or str(job.state)
        return TaskOutcome(
            task=task, status=Status.FAILED, error=error, job=job.id, seconds=seconds
        )
    # The winner of this very job; by now another may be served.
    device = next(
        event.data["device"]
        for event in reversed(queue.events(job.id, limit=100_000))
        if event.kind == "winner"
    )
    history = store.history(task.problem, device)
    winner = next((each for each in history if each.revision == job.winner_revision), None)
    return TaskOutcome(task=task, status=Status.TUNED, result=winner, job=job.id, seconds=seconds)
