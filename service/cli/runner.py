"""Tunes a list of problems at one of three places, and prints what came of each.

The places are this machine's device, a service, and the GPUs of a fleet. Only the first measures in
this process; at the others each problem is a job, which goes on if the command is interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import TYPE_CHECKING, Protocol

from gemmsmith.core.operation import Operation
from gemmsmith.core.tuning import JobState
from gemmsmith.errors import JobCancelled, JobFailed
from gemmsmith.http.client import Client
from gemmsmith.http.handles import TuningJob
from gemmsmith.http.requests import deadline_of, effort_of, fields_of
from service.cli.jobs import LOOK_S, abandoned, say_busy, show_progress, waiting
from service.cli.outcomes import Status, TaskOutcome, not_served, report
from service.cli.output import TUNING, CommandError, Reporter, emit, note, reporter, say
from service.cli.session import (
    connect,
    device_called,
    made_store,
    signed_store,
    stop_flag,
    tuning_session,
)
from service.cli.tasks import Task, TuningOptions, by_stake

if TYPE_CHECKING:
    from gemmsmith.core.device import DeviceModel
    from gemmsmith.http.jobs import JobStatus
    from service.settings import Settings
    from tuner.devices.base import Device
    from tuner.jobs import Job, Queue
    from tuner.store import Store


class TuningPlace(Protocol):
    """Where tasks are tuned."""

    def request(self, tasks: Sequence[Task], whole: bool) -> None:
        """Take the tasks; `whole` if they are a suite."""

    def outcomes(self, says: Reporter) -> Iterator[TaskOutcome]:
        """What came of each task; a later outcome of the same task replaces the earlier one.

        Raises:
            KeyboardInterrupt: the user stopped it.
        """

    def left_behind(self, outcomes: Sequence[TaskOutcome]) -> str:
        """What an interrupted command leaves behind, and how to go on or to cancel it."""


def run(
    opening: AbstractContextManager[TuningPlace],
    tasks: Sequence[Task],
    *,
    whole: bool,
    as_json: bool,
) -> int:
    """Tune the tasks at a place, and print what came of them; the exit status.

    Raises:
        TunerError: the database, the device or the compiler cannot be used at all; with a single
            problem, also what kept it from being tuned.
        GemmsmithError: the service is away or refuses.
        CommandError: the fleet's database knows no such device model.
        KeyboardInterrupt: the user stopped it, and what there was is printed; says what is left.
    """
    began = time.monotonic()
    outcomes: dict[Task, TaskOutcome] = {}
    interrupted = ""
    with opening as place:
        place.request(tasks, whole)
        if isinstance(place, _Requested) and not place.tuning.wait:
            place.print_jobs(as_json)
            return 0
        try:
            with reporter(TUNING) as says:
                for outcome in place.outcomes(says):
                    outcomes[outcome.task] = outcome  # a second one keeps the place of the first
                    # What was not recorded, or not begun, is summed up at the end.
                    begun = outcome.result is not None or outcome.error
                    if whole and begun and outcome.status is not Status.UNRECORDED:
                        says.line(f"  {outcome.line()}")
        except KeyboardInterrupt:
            interrupted = place.left_behind(list(outcomes.values()))
    code = report(
        list(outcomes.values()), whole=whole, as_json=as_json, seconds=time.monotonic() - began
    )
    if interrupted:
        raise KeyboardInterrupt(interrupted)
    return code


@contextmanager
def here(settings: Settings, tuning: TuningOptions) -> Iterator[TuningPlace]:
    with signed_store(settings) as store, on_device(settings, store, tuning) as place:
        yield place


@contextmanager
def on_device(
    settings: Settings, store: Store, tuning: TuningOptions, device: Device | None = None
) -> Iterator[TuningPlace]:
    """This machine's device, with an open database. `device`: as of `tuning_session`."""
    from service.cli.local import Here

    began = time.monotonic()  # the time limit includes opening the device
    with stop_flag() as stop, tuning_session(settings, store, device) as session:
        yield Here(session, tuning, stop, began)


@contextmanager
def service(tuning: TuningOptions) -> Iterator[TuningPlace]:
    deadline_of(tuning.deadline)  # refused before anything is requested
    with connect(str(tuning.url)) as client:
        yield _Service(client, tuning)


@contextmanager
def fleet(settings: Settings, tuning: TuningOptions, words: Sequence[str]) -> Iterator[TuningPlace]:
    """The GPUs of the fleet whose workers take jobs from the database.

    `words` is the option that names the database, if any.
    """
    from tuner.jobs import Queue

    deadline_of(tuning.deadline)  # refused before anything is requested
    with made_store(settings) as store:
        model = _model(store, settings.device)
        yield _Fleet(store, Queue(store, limit=settings.queue_limit), model, tuning, words)


class _Requested:
    """Tasks that were requested as jobs.

    Attributes:
        left: the tasks whose jobs have not ended, by the job's identifier.
        listed: what `--no-wait --json` prints of each job.
    """

    listed: tuple[str, ...] = ("id", "state")

    def __init__(self, tuning: TuningOptions, words: Sequence[str]) -> None:
        self.tuning = tuning
        self._words = words  # the option that says where the jobs are
        self._jobs: list[tuple[Task, JobStatus | Job]] = []
        self.left: dict[str, Task] = {}

    def print_jobs(self, as_json: bool) -> None:
        if as_json:
            rows = [{name: getattr(job, name) for name in self.listed} for _, job in self._jobs]
            emit({"jobs": rows})
            return
        for task, job in self._jobs:
            say(f"{job.id}  {job.state}  {task.problem}")

    def left_behind(self, _: Sequence[TaskOutcome]) -> str:
        return abandoned(list(self.left), self._words)


class _Service(_Requested):
    """Jobs of a service, requested with the largest first and followed in the service's order.

    Where its queue has no room, requests wait for some: for the time limit in all, else for ever.
    """

    listed = ("id", "state", "calls", "expected_saving_us")

    def __init__(self, client: Client, tuning: TuningOptions) -> None:
        super().__init__(tuning, ("--url", client.url))
        self._client = client
        self._handles: list[tuple[Task, TuningJob]] = []

    def request(self, tasks: Sequence[Task], whole: bool) -> None:  # noqa: ARG002
        limit = self.tuning.time_limit
        until = inf if limit is None else time.monotonic() + limit
        counted = any(task.calls for task in tasks)
        if counted:  # a worker may begin with the first request
            from tuner.search.demand import saving_us

            tasks = by_stake(tasks, lambda problem: saving_us(problem, None, []))
        self._handles = [(task, self._request(task, until)) for task in tasks]
        if counted:  # the service knows the winners, so its estimate is the better one
            self._handles.sort(
                key=lambda pair: pair[1].status.expected_saving_us or 0.0, reverse=True
            )
        self._jobs = [(task, job.status) for task, job in self._handles]
        self.left = {job.id: task for task, job in self._handles}

    def _request(self, task: Task, until: float) -> TuningJob:
        tuning = self.tuning
        return self._client.tune(
            **fields_of(task.problem),
            effort=tuning.effort,
            priority=tuning.priority,
            device=tuning.device,
            calls=task.calls,
            deadline_s=tuning.deadline,
            timeout=max(0.0, until - time.monotonic()),
            on_busy=say_busy,
        )

    def print_jobs(self, as_json: bool) -> None:
        super().print_jobs(as_json)
        if as_json:
            return
        if self._jobs and (waits := self._client.job_status(self._jobs[0][1].id).waits):
            note(f"the first one {waits}")
        note(f"follow one with: gemmsmith jobs watch ID --url {self._client.url}")

    def outcomes(self, says: Reporter) -> Iterator[TaskOutcome]:
        for i, (task, job) in enumerate(self._handles):
            says.overall(i, len(self._handles), f"{task.problem} {task.origin}".strip())
            outcome = self._follow(task, job, says)
            self.left.pop(job.id, None)
            yield outcome

    def _follow(self, task: Task, job: TuningJob, says: Reporter) -> TaskOutcome:
        began = time.monotonic()
        try:
            with waiting(lambda: self._client.job_status(job.id), self._words, says):
                answer = job.wait(on_progress=lambda status: show_progress(status, says))
        except (JobFailed, JobCancelled) as error:
            return TaskOutcome.without_winner(task, Status.FAILED, str(error), began, job.id)
        return TaskOutcome(
            task=task,
            status=Status.TUNED,
            result=answer,
            job=job.id,
            seconds=time.monotonic() - began,
            kept=not_served(answer.revision, answer.served),
        )


class _Fleet(_Requested):
    """Jobs in the database, requested in `fleet_order`.

    If tasks have calls, the queue puts those first in which most time is at stake.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        model: DeviceModel | None,
        tuning: TuningOptions,
        words: Sequence[str],
    ) -> None:
        super().__init__(tuning, words)
        self._store = store
        self._queue = queue
        self._model = model
        self._current: list[TaskOutcome] = []

    def request(self, tasks: Sequence[Task], whole: bool) -> None:
        for task in fleet_order(tasks, self._model):
            skips = whole and not self.tuning.again
            if skips and (outcome := self._still_current(task)) is not None:
                self._current.append(outcome)
            else:
                self._jobs.append((task, self._request(task)))
        self.left = {job.id: task for task, job in self._jobs}

    def _still_current(self, task: Task) -> TaskOutcome | None:
        """The outcome of a task whose winner the software in use has measured; else None."""
        model = self._model
        winner = None if model is None else self._store.winner(task.problem, model.slug)
        if winner is None or winner.stale or winner.replayed or not winner.job:
            return None
        return TaskOutcome(task=task, status=Status.CURRENT, result=winner)

    def _request(self, task: Task) -> Job:
        from tuner.search import demand

        model, tuning = self._model, self.tuning
        job, _ = self._queue.enqueue(
            task.problem,
            effort=effort_of(tuning.effort),
            device=model.slug if model is not None else "",
            priority=tuning.priority,
            calls=task.calls,
            saving_us=demand.estimate(self._store, task.problem, model) if task.calls else 0.0,
            deadline_s=tuning.deadline,
        )
        return job

    def outcomes(self, says: Reporter) -> Iterator[TaskOutcome]:
        yield from self._current
        began = time.monotonic()
        total = len(self.left)
        while self.left:
            for identifier, task in list(self.left.items()):
                job = self._queue.get(identifier)
                if job.state.terminal:
                    del self.left[identifier]
                    says.overall(total - len(self.left) - 1, total, str(task.problem))
                    yield self._outcome(task, job, began)
            if self.left:
                time.sleep(LOOK_S)

    def _outcome(self, task: Task, job: Job, began: float) -> TaskOutcome:
        if job.state is not JobState.DONE:
            reason = job.error or str(job.state)
            return TaskOutcome.without_winner(task, Status.FAILED, reason, began, job.id)
        # The winner of this very job; by now another may be served.
        device = next(
            event.data["device"]
            for event in reversed(self._queue.events(job.id, limit=100_000))
            if event.kind == "winner"
        )
        history = self._store.history(task.problem, device)
        winner = next((w for w in history if w.revision == job.winner_revision), None)
        seconds = time.monotonic() - began
        return TaskOutcome(
            task=task, status=Status.TUNED, result=winner, job=job.id, seconds=seconds
        )


def fleet_order(tasks: Sequence[Task], model: DeviceModel | None) -> list[Task]:
    """The longest of each operation, then the others, longest first."""
    # A task's length is that of a launch, by the cost model's roofline: tuning takes as much
    # longer. So no long task is begun when all the other GPUs have run out of work. An operation's
    # first kernels suffice for most of its problems, so those of all operations are compiled side
    # by side at the start. On a fleet of one H200 with 16 cores and nothing compiled, 28 of 34
    # problems in fp16 were measured after 150 s, and the rest, of other layouts, had to wait until
    # 216 s for kernels whose turn to be compiled had come late (2026-11-24).
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
    """The device model that the jobs are for; None if any GPU may take them.

    Raises:
        CommandError: the database knows no such device model.
    """
    if not device:
        return None
    known = {model.slug: model for model in store.devices()}
    try:
        return known[device_called(device.removeprefix("replay:"), known)]
    except CommandError as error:
        raise CommandError(
            f"{error} in the database. Without --device any GPU of the fleet takes the jobs"
        ) from None
