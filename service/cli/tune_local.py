"""`gemmsmith tune` on this machine's device: one device session for the whole list."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemmsmith.core.device import time_text
from gemmsmith.core.tuning import Effort
from service.cli.progress import TUNING, Reporter, reporter
from service.cli.session import StopFlag, TuningSession, local
from service.cli.tasks import Status, Task, TaskOutcome, by_stake, not_served, report
from tuner.errors import (
    CompilerNotFound,
    DeviceError,
    JobAborted,
    NoGpu,
    NoLegalCandidate,
    NotRecorded,
)

_FIRST, _COMPILED = 0.6, 0.9
"""Shares of a suite's bar: first answers, then what is compiled for second ones."""

if TYPE_CHECKING:
    from gemmsmith.core.kernel import AnyKernel
    from service.settings import Settings
    from tuner.search.progress import Progress
    from tuner.trial import Winner


def run(
    settings: Settings,
    tasks: Sequence[Task],
    *,
    effort: Effort,
    skip_current: bool,
    compiled_only: bool,
    time_limit: float | None,
    as_json: bool,
    whole: bool,
) -> int:
    """Tune every task, most time at stake first, and print what came of it; the exit status.

    Of a suite every problem is answered first from the kernels that are built. What is worth
    compiling besides is then compiled all at once, and the problems in question are tuned again.

    Raises:
        TunerError: the database, the device or the compiler cannot be used at all; with a single
            problem, also what kept it from being tuned.
        KeyboardInterrupt: it was stopped, and what there was is printed; says what is kept.
    """
    from tuner.search import demand

    began = time.monotonic()
    deadline = None if time_limit is None else began + time_limit
    with StopFlag() as stop, local(settings) as session, reporter(TUNING) as says:
        model = session.device.model
        tasks = by_stake(tasks, lambda problem: demand.estimate(session.store, problem, model))
        tuning = _Tuning(session, effort, compiled_only, stop, says)
        outcomes: list[TaskOutcome] = []
        later: dict[int, list[AnyKernel]] = {}

        if whole and session.device.needs_packs:
            says.span(0.0, _FIRST)

        def over() -> bool:
            return stop() or (deadline is not None and time.monotonic() >= deadline)

        for i, task in enumerate(tasks):
            if over():
                outcomes += [TaskOutcome(task=rest, status=Status.SKIPPED) for rest in tasks[i:]]
                break
            says.overall(i, len(tasks), f"{task.problem} {task.origin}".strip())
            if skip_current and (current := _current(session, task)) is not None:
                outcomes.append(TaskOutcome(task=task, status=Status.CURRENT, result=current))
            elif whole:
                outcomes.append(tuning.of_suite(task, later.setdefault(i, []).extend))
            else:
                outcomes.append(tuning.one(task))
            if whole and outcomes[-1].status is not Status.UNRECORDED:  # these come together below
                says.line(f"  {outcomes[-1].line()}")
        again = [i for i, kernels in later.items() if kernels]
        if again and not over():
            says.line(f"{len(outcomes)} answered in {time.monotonic() - began:.0f} s")
            says.span(_FIRST, _COMPILED)
            tuning.compile([kernel for i in again for kernel in later[i]])
            says.span(_COMPILED, 1.0)
            for done, i in enumerate(again):
                if over():
                    break
                says.overall(done, len(again), f"{tasks[i].problem} {tasks[i].origin}".strip())
                outcomes[i] = tuning.of_suite(tasks[i], lambda _: None, outcomes[i])
                says.line(f"  {outcomes[i].line()}")
        interrupted = stop()
    code = report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)
    if interrupted:
        raise KeyboardInterrupt(_kept(outcomes))
    return code


def _kept(outcomes: Sequence[TaskOutcome]) -> str:
    """What an interrupted command leaves behind."""
    tuned = sum(outcome.status is Status.TUNED for outcome in outcomes)
    return (
        f"interrupted: {tuned} of {len(outcomes)} problems have a new winner, and every trial is "
        "kept; run the same command to continue"
    )


def _current(session: TuningSession, task: Task) -> Winner | None:
    """The winner there is, if it was found with this very software and, with a GPU, on one."""
    device = session.device
    current = session.store.winner(task.problem, device.model.slug)
    if current is None or current.replayed != device.replayed:
        return None
    return current if current.environment.same_software(device.environment) else None


@dataclass(frozen=True, slots=True)
class _Tuning:
    """How every problem of the command is tuned."""

    session: TuningSession
    effort: Effort
    compiled_only: bool
    stop: StopFlag
    says: Reporter

    def one(
        self, task: Task, defer: Callable[[Sequence[AnyKernel]], None] | None = None
    ) -> TaskOutcome:
        """Tune a problem; with `defer`, from what is built if that is enough for an answer.

        Raises:
            TunerError: what kept it from being tuned.
        """
        from tuner.search.progress import Step
        from tuner.search.run import tune

        began = time.monotonic()
        answered: list[float] = []

        def on_event(progress: Progress) -> None:
            if progress.phase is Step.PROMOTE:
                answered.append(time.monotonic() - began)
            self._show(progress)

        try:
            winner = tune(
                task.problem,
                device=self.session.device,
                store=self.session.store,
                builder=self.session.builder,
                ranker=self.session.ranker,
                effort=self.effort,
                compiled_only=self.compiled_only,
                defer=defer,
                job=f"local-{secrets.token_hex(6)}",  # so that tuning again keeps new samples too
                on_event=on_event,
                should_stop=self.stop,
            )
        except JobAborted as error:
            return _without(task, Status.SKIPPED, str(error), began)
        served = self.session.store.winner(task.problem, winner.device.slug)
        return TaskOutcome(
            task=task,
            status=Status.TUNED,
            result=winner,
            seconds=time.monotonic() - began,
            answered=answered[0],
            kept=not_served(winner.revision, served),
        )

    def of_suite(
        self,
        task: Task,
        defer: Callable[[Sequence[AnyKernel]], None],
        before: TaskOutcome | None = None,
    ) -> TaskOutcome:
        """The same, but what keeps one problem from being tuned does not end the others.

        `before` is what came of it the first time: it stays where there is nothing new.
        """
        began = time.monotonic()
        try:
            outcome = self.one(task, defer)
        except (CompilerNotFound, NoGpu):
            raise  # the next problem would fail alike
        except (NoLegalCandidate, DeviceError) as error:
            unrecorded = isinstance(error, NotRecorded)
            status = Status.UNRECORDED if unrecorded else Status.FAILED
            outcome = _without(task, status, str(error), began)
        if before is None:
            return outcome
        if outcome.result is None:
            return before
        seconds = before.seconds + outcome.seconds
        return replace(outcome, seconds=seconds, answered=before.answered)

    def compile(self, kernels: Sequence[AnyKernel]) -> None:
        """Build what problems have put off, each kernel once."""
        builder = self.session.builder
        wanted = list(dict.fromkeys(kernels))
        if builder is None:
            return
        title = f"compiling {len(wanted)} kernels worth another look"
        for done, built in enumerate(builder.build(wanted), start=1):
            self.says.overall(done - 1, len(wanted), title)
            if built.failure is not None:
                self.says.line(f"  {built.kernel.name}: {built.failure.message}")
            if self.stop():
                return

    def _show(self, progress: Progress) -> None:
        us = progress.best_us
        best = "" if us is None else time_text(us, progress.recorded)
        self.says.update(
            progress.phase,
            progress.done,
            progress.total,
            best=best,
            message=progress.message,
        )


def _without(task: Task, status: Status, error: str | None, began: float) -> TaskOutcome:
    return TaskOutcome(task=task, status=status, error=error, seconds=time.monotonic() - began)
