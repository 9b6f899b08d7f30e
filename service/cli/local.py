"""`gemmsmith tune` on this machine's device: one device session for the whole list."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gemmsmith.core.device import time_text
from gemmsmith.http.requests import effort_of
from service.cli.outcomes import Status, TaskOutcome, not_served
from service.cli.output import Reporter
from service.cli.session import TuningSession
from service.cli.tasks import Task, TuningOptions, by_stake
from tuner.errors import JobAborted, NotRecorded
from tuner.search import demand
from tuner.search.progress import Listener, Progress, Step
from tuner.search.run import TuningRun
from tuner.search.together import Member, Together

if TYPE_CHECKING:
    from tuner.trial import Winner


_FIRST = 0.6
"""Share of a suite's bar for first answers."""


class Here:
    """This machine's device, as a `TuningPlace`.

    Tasks are tuned with most time at stake first.
    """

    def __init__(
        self, session: TuningSession, tuning: TuningOptions, stop: Callable[[], bool], began: float
    ) -> None:
        self._session = session
        self._tuning = tuning
        self._stop = stop
        self._tasks: Sequence[Task] = ()
        self._whole = False
        self._began = began

    def request(self, tasks: Sequence[Task], whole: bool) -> None:
        store, model = self._session.store, self._session.device.model
        self._tasks = by_stake(tasks, lambda problem: demand.estimate(store, problem, model))
        self._whole = whole

    def left_behind(self, outcomes: Sequence[TaskOutcome]) -> str:
        tuned = sum(outcome.status is Status.TUNED for outcome in outcomes)
        return (
            f"interrupted: {tuned} of {len(self._tasks)} problems have a new winner, and every "
            "trial is kept; run the same command to continue"
        )

    def outcomes(self, says: Reporter) -> Iterator[TaskOutcome]:
        if self._whole:
            yield from self._together(says)
        else:
            for i, task in enumerate(self._tasks):
                says.overall(i, len(self._tasks), f"{task.problem} {task.origin}".strip())
                yield self._alone(task, says)
        if self._stop():
            raise KeyboardInterrupt

    def _together(self, says: Reporter) -> Iterator[TaskOutcome]:
        """Of a suite; a problem has a second outcome after kernels were compiled for it."""
        tasks: dict[Member, Task] = {}
        for task in self._tasks:
            if (current := self._current(task)) is not None:
                yield TaskOutcome(task=task, status=Status.CURRENT, result=current)
            else:
                run = self._run(task, partial(_show, says))
                tasks[Member(run=run, calls=task.calls)] = task
        members = list(tasks)
        unit = "in all calls" if any(task.calls for task in self._tasks) else "with one call each"

        def on_begin(member: Member) -> None:
            task = tasks[member]
            says.span(*((0.0, _FIRST) if member.winner is None else (_FIRST, 1.0)))
            say_overall(f"{task.problem} {task.origin}".strip())

        def on_wait(done: int, kernels: int) -> None:
            say_overall("compiling for all of them")
            says.update(Step.COMPILE, done, kernels)

        def say_overall(what: str) -> None:
            answered = sum(bool(member.winner or member.error) for member in members)
            says.overall(min(answered, len(members) - 1), len(members), what)

        together = Together(
            members,
            builder=self._session.builder if self._session.device.needs_packs else None,
            over=self._over,
            on_begin=on_begin,
            on_wait=on_wait,
        )
        for member in together.outcomes():
            yield self._outcome(tasks[member], member)
            if member.winner is not None:
                says.line(f"  saved so far: {together.saved_us / 1e3:.3f} ms {unit}")
        for member, task in tasks.items():
            if member.winner is None and member.error is None:
                yield TaskOutcome(task=task, status=Status.SKIPPED)

    def _over(self) -> bool:
        limit = self._tuning.time_limit
        return self._stop() or (limit is not None and time.monotonic() - self._began >= limit)

    def _current(self, task: Task) -> Winner | None:
        """The winner that makes tuning a suite's problem needless.

        This very software has measured it, on a GPU if there is one.
        """
        if not self._whole or self._tuning.again:
            return None
        device = self._session.device
        current = self._session.store.winner(task.problem, device.model.slug)
        if current is None or current.replayed != device.replayed:
            return None
        return current if current.environment.same_software(device.environment) else None

    def _alone(self, task: Task, says: Reporter) -> TaskOutcome:
        """Tune one problem.

        Raises:
            TunerError: what kept it from being tuned.
        """
        began = time.monotonic()
        answered: list[float] = []

        def on_event(progress: Progress) -> None:
            if progress.phase is Step.PROMOTE:
                answered.append(time.monotonic() - began)
            _show(says, progress)

        member = Member(run=self._run(task, on_event))
        try:
            member.winner = member.run.tune()
            member.answered = answered[0]
        except JobAborted as error:
            member.error = error
        member.seconds = time.monotonic() - began
        return self._outcome(task, member)

    def _run(self, task: Task, on_event: Listener) -> TuningRun:
        session = self._session
        return TuningRun(
            problem=task.problem,
            device=session.device,
            store=session.store,
            builder=session.builder,
            effort=effort_of(self._tuning.effort),
            compiled_only=self._tuning.compiled_only,
            job=f"local-{secrets.token_hex(6)}",  # so that tuning again keeps new samples too
            on_event=on_event,
            should_stop=self._stop,
        )

    def _outcome(self, task: Task, member: Member) -> TaskOutcome:
        if (winner := member.winner) is None:
            match member.error:
                case NotRecorded():
                    status = Status.UNRECORDED
                case JobAborted():
                    status = Status.SKIPPED
                case _:
                    status = Status.FAILED
            error = str(member.error)
            return TaskOutcome(task=task, status=status, error=error, seconds=member.seconds)
        served = self._session.store.winner(task.problem, winner.device.slug)
        return TaskOutcome(
            task=task,
            status=Status.TUNED,
            result=winner,
            seconds=member.seconds,
            answered=member.answered,
            kept=not_served(winner.revision, served),
        )


def _show(says: Reporter, progress: Progress) -> None:
    us = progress.best_us
    best = "" if us is None else time_text(us, progress.recorded)
    says.update(
        *(progress.phase, progress.done, progress.total), best=best, message=progress.message
    )
