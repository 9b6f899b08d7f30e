"""`gemmsmith tune --fleet`: request jobs in the database for a fleet's GPUs, and follow them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.core.tuning import Effort, JobState
from service.cli.follow import abandoned
from service.cli.options import device_called
from service.cli.output import CommandError, emit, say
from service.cli.progress import Reporter, reporter
from service.cli.session import say_made
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
    place: Sequence[str],
) -> int:
    """Request every task in `fleet_order`, and follow them to their end; the exit status.

    Where tasks say how often they are run, the queue puts those first in which most time is at
    stake. `place` is the option that says where the database is, if any.

    Raises:
        StoreError: the database cannot be used.
        CommandError: it knows no such device model.
        KeyboardInterrupt: it was stopped, and what there was is printed; says how to cancel the
            jobs that are left, which go on.
    """
    from service.database import open_store
    from tuner.jobs import Queue

    began = time.monotonic()
    with open_store(settings, on_made=say_made) as store:
        model = _model(store, settings.device)
        outcomes, requests = [], []
        queue = Queue(store, limit=settings.queue_limit)
        for task in fleet_order(tasks, model):
            if skip_current and (outcome := _current(store, task, model)) is not None:
                outcomes.append(outcome)
            else:
                job = _request(store, queue, task, model, effort, priority, deadline_s)
                requests.append((task, job))
        if not wait:
            if as_json:
                emit({"jobs": [{"id": job.id, "state": job.state} for _, job in requests]})
            else:
                for task, job in requests:
                    say(f"{job.id}  {job.state}  {task.problem}")
            return 0
        left = dict(enumerate(requests))
        interrupted = False
        try:
            with reporter() as says:
                for outcome in _follow(store, queue, left, says):
                    outcomes.append(outcome)
                    if whole:
                        says.line(f"  {outcome.line()}")
        except KeyboardInterrupt:
            interrupted = True
    code = report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)
    if interrupted:
        raise KeyboardInterrupt(abandoned([job.id for _, job in left.values()], place))
    return code


def fleet_order(tasks: Sequence[Task], model: DeviceModel | None) -> list[Task]:
    """The longest of each operation, then the others, longest first.

    How long a launch takes, by the cost model's roofline, tells how long tuning does: so no long
    one is begun when all the other GPUs have run out of work. An operation's first kernels suffice
    for most of its problems, so those of all operations are compiled side by side at the start. On
    a fleet of one H200 with 16 cores and nothing compiled, 28 of 34 problems in fp16 were measured
    after 150 s, and the rest, of other layouts, had to wait until 216 s for kernels whose turn to
    be compiled had come late (2026-11-24).
    """
    from tuner.search.demand import roofline_us

    longest = sorted(tasks, key=lambda task: roofline_us(task.problem, model), reverse=True)
    seen: set[Operation] = set()
    first: list[Task] = []
    others: list[Task] = []
    for task in longest:
        operation = task.problem.operation
        (others if operation in seen else first).append(task)
        seen.add(operation)
    return [*first, *others]


def _model(store: Store, device: str) -> DeviceModel | None:
    """The device model the jobs are for; None: whichever GPU is free."""
    if not device:
        return None
    known = {model.slug: model for model in store.devices()}
    try:
        return known[device_called(device.removeprefix("replay:"), known)]
    except CommandError as error:
        raise CommandError(
            f"{error} in the database. Without --device any GPU of the fleet takes the jobs"
        ) from None


def _request(
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
    left: dict[int, tuple[Task, Job]],
    says: Reporter,
) -> Iterator[TaskOutcome]:
    """What came of each job, as they end; `left` are those that have not."""
    began = time.monotonic()
    total = len(left)
    while left:
        for number, (task, job) in list(left.items()):
            now = queue.get(job.id)
            if not now.state.terminal:
                continue
            del left[number]
            says.overall(total - len(left) - 1, total, str(task.problem))
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
