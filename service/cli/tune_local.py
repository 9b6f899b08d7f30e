"""`gemmsmith tune` on this machine's device: one device session for the whole list."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemmsmith.tuning import Effort
from service.cli.progress import Reporter, reporter
from service.cli.session import Session, StopFlag, local
from service.cli.tasks import Outcome, Status, Task, by_stake, report
from tuner.errors import (
    CompilerNotFound,
    DeviceError,
    JobAborted,
    NoGpu,
    NoLegalCandidate,
    NotRecorded,
)

if TYPE_CHECKING:
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

    Raises:
        TunerError: the database, the device or the compiler cannot be used at all; with a single
            problem, also what kept it from being tuned.
    """
    from tuner.search import demand

    began = time.monotonic()
    deadline = None if time_limit is None else began + time_limit
    outcomes: list[Outcome] = []
    with StopFlag() as stop, local(settings) as session, reporter() as says:
        model = session.device.model
        tasks = by_stake(tasks, lambda problem: demand.estimate(session.store, problem, model))
        for i, task in enumerate(tasks):
            if stop() or (deadline is not None and time.monotonic() >= deadline):
                outcomes += [Outcome(task=rest, status=Status.SKIPPED) for rest in tasks[i:]]
                break
            says.overall(i, len(tasks), f"{task.problem} {task.origin}".strip())
            if skip_current and (current := _current(session, task)) is not None:
                outcome = Outcome(task=task, status=Status.CURRENT, result=current)
            else:
                outcome = _one(
                    session, task, effort, stop, says, strict=not whole, compiled=compiled_only
                )
            outcomes.append(outcome)
            if whole:
                says.line(f"  {outcome.line()}")
    return report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)


def _current(session: Session, task: Task) -> Winner | None:
    """The winner there is, if it was found with this very software and, with a GPU, on one."""
    device = session.device
    current = session.store.winner(task.problem, device.model.slug)
    if current is None or current.replayed != device.replayed:
        return None
    return current if current.environment.same_software(device.environment) else None


def _one(
    session: Session,
    task: Task,
    effort: Effort,
    stop: StopFlag,
    says: Reporter,
    *,
    strict: bool,
    compiled: bool,
) -> Outcome:
    from tuner.search.run import tune

    def on_event(progress: Progress) -> None:
        says.update(
            progress.phase,
            progress.done,
            progress.total,
            best_us=progress.best_us,
            message=progress.message,
        )

    began = time.monotonic()
    try:
        winner = tune(
            task.problem,
            device=session.device,
            store=session.store,
            builder=session.builder,
            ranker=session.ranker,
            effort=effort,
            compiled_only=compiled,
            job=f"local-{secrets.token_hex(6)}",  # so that tuning again keeps the new samples too
            on_event=on_event,
            should_stop=stop,
        )
    except JobAborted:
        return _without(task, Status.SKIPPED, None, began)
    except (CompilerNotFound, NoGpu):
        raise  # the next problem would fail alike
    except (NoLegalCandidate, DeviceError) as error:
        if strict:
            raise
        unrecorded = isinstance(error, NotRecorded)
        status = Status.UNRECORDED if unrecorded else Status.FAILED
        return _without(task, status, str(error), began)
    return Outcome(task=task, status=Status.TUNED, result=winner, seconds=time.monotonic() - began)


def _without(task: Task, status: Status, error: str | None, began: float) -> Outcome:
    return Outcome(task=task, status=status, error=error, seconds=time.monotonic() - began)
