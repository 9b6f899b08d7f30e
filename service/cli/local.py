"""`gemmsmith tune` on this machine's device: one device session for the whole list."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gemmsmith.core.device import time_text
from gemmsmith.http.requests import effort_of
from service.cli.outcomes import Status, TaskOutcome, not_served
from service.cli.output import Reporter
from service.cli.session import TuningSession
from service.cli.tasks import Task, TuningOptions, by_stake
from tuner.errors import (
    CompilerNotFound,
    DeviceError,
    JobAborted,
    NoGpu,
    NoLegalCandidate,
    NotRecorded,
)
from tuner.search import demand
from tuner.search.run import Progress, Step, TuningRun

if TYPE_CHECKING:
    from gemmsmith.core.kernel import AnyKernel
    from tuner.trial import Winner

_FIRST, _COMPILED = 0.6, 0.9
"""Shares of a suite's bar: first answers, then what is compiled for second ones."""

Defer = Callable[[Sequence["AnyKernel"]], None]
"""Takes the kernels worth compiling, if compiled ones are enough for a first answer."""


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
        tasks = self._tasks
        later: dict[Task, list[AnyKernel]] = {}
        first: dict[Task, TaskOutcome] = {}
        if self._whole and self._session.device.needs_packs:
            says.span(0.0, _FIRST)
        for i, task in enumerate(tasks):
            if self._over():
                yield from (TaskOutcome(task=rest, status=Status.SKIPPED) for rest in tasks[i:])
                break
            says.overall(i, len(tasks), f"{task.problem} {task.origin}".strip())
            if (current := self._current(task)) is not None:
                outcome = TaskOutcome(task=task, status=Status.CURRENT, result=current)
            elif self._whole:
                outcome = self._of_suite(task, says, later.setdefault(task, []).extend)
            else:
                outcome = self._tune(task, says)
            first[task] = outcome
            yield outcome
        # What is worth compiling besides is compiled when every problem of a suite has an answer.
        # Compiled together, kernels of one family share the front end's time, and no core waits.
        again = [task for task, kernels in later.items() if kernels]
        if again and not self._over():
            says.line(f"{len(first)} answered in {time.monotonic() - self._began:.0f} s")
            says.span(_FIRST, _COMPILED)
            self._compile([kernel for task in again for kernel in later[task]], says)
            says.span(_COMPILED, 1.0)
            for i, task in enumerate(again):
                if self._over():
                    break
                says.overall(i, len(again), f"{task.problem} {task.origin}".strip())
                outcome = self._of_suite(task, says, lambda _: None)
                before = first[task]
                if outcome.result is None:  # the first answer stays
                    yield before
                else:
                    seconds = before.seconds + outcome.seconds
                    yield replace(outcome, seconds=seconds, answered=before.answered)
        if self._stop():
            raise KeyboardInterrupt

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

    def _of_suite(self, task: Task, says: Reporter, defer: Defer) -> TaskOutcome:
        """As `_tune`, but what keeps one problem from being tuned does not end the others."""
        began = time.monotonic()
        try:
            return self._tune(task, says, defer)
        except (CompilerNotFound, NoGpu):
            raise  # the next problem would fail for the same reason
        except (NoLegalCandidate, DeviceError) as error:
            unrecorded = isinstance(error, NotRecorded)
            status = Status.UNRECORDED if unrecorded else Status.FAILED
            return TaskOutcome.without_winner(task, status, str(error), began)

    def _tune(self, task: Task, says: Reporter, defer: Defer | None = None) -> TaskOutcome:
        """Tune a problem; with `defer`, from compiled kernels if they are enough for an answer.

        Raises:
            TunerError: what kept it from being tuned.
        """
        session = self._session
        began = time.monotonic()
        answered: list[float] = []

        def on_event(progress: Progress) -> None:
            if progress.phase is Step.PROMOTE:
                answered.append(time.monotonic() - began)
            us = progress.best_us
            best = "" if us is None else time_text(us, progress.recorded)
            says.update(
                *(progress.phase, progress.done, progress.total),
                best=best,
                message=progress.message,
            )

        try:
            winner = TuningRun(
                problem=task.problem,
                device=session.device,
                store=session.store,
                builder=session.builder,
                effort=effort_of(self._tuning.effort),
                compiled_only=self._tuning.compiled_only,
                defer=defer,
                job=f"local-{secrets.token_hex(6)}",  # so that tuning again keeps new samples too
                on_event=on_event,
                should_stop=self._stop,
            ).tune()
        except JobAborted as error:
            return TaskOutcome.without_winner(task, Status.SKIPPED, str(error), began)
        served = session.store.winner(task.problem, winner.device.slug)
        return TaskOutcome(
            task=task,
            status=Status.TUNED,
            result=winner,
            seconds=time.monotonic() - began,
            answered=answered[0],
            kept=not_served(winner.revision, served),
        )

    def _compile(self, kernels: Sequence[AnyKernel], says: Reporter) -> None:
        """Compile the kernels that were deferred, each once."""
        builder = self._session.builder
        if builder is None:
            return
        distinct = list(dict.fromkeys(kernels))
        title = f"compiling {len(distinct)} kernels worth another look"
        for done, built in enumerate(builder.build(distinct)):
            says.overall(done, len(distinct), title)
            if built.failure is not None:
                says.line(f"  {built.kernel.name}: {built.failure.message}")
            if self._stop():
                return
