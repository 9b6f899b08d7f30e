"""`gemmsmith tune` on this machine's device: one device session for the whole list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemmsmith.tuning import Effort
from service.cli.progress import Reporter, reporter
from service.cli.session import Session, StopFlag, local
from service.cli.tasks import Outcome, Status, Task, report
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


def run(
    settings: Settings,
    tasks: Sequence[Task],
    *,
    effort: Effort,
    skip_current: bool,
    time_limit: float | None,
    as_json: bool,
    whole: bool,
) -> int:
    """Tune every task and print what came of it; the exit status.

    Raises:
        TunerError: the database, the device or the compiler cannot be used at all; with a single
            problem, also what kept it from being tuned.
    """
    began = time.monotonic()
    deadline = None if time_limit is None else began + time_limit
    outcomes: list[Outcome] = []
    with StopFlag() as stop, local(settings) as session, reporter() as says:
        for i, task in enumerate(tasks):
            if stop() or (deadline is not None and time.monotonic() >= deadline):
                outcomes += [Outcome(task=rest, status=Status.SKIPPED) for rest in tasks[i:]]
                break
            says.overall(i, len(tasks), f"{task.problem} {task.origin}".strip())
            outcome = _one(session, task, effort, skip_current, stop, says, strict=not whole)
            outcomes.append(outcome)
            if whole:
                says.line(f"  {outcome.line()}")
    return report(outcomes, whole=whole, as_json=as_json, seconds=time.monotonic() - began)


def _one(
    session: Session,
    task: Task,
    effort: Effort,
    skip_current: bool,
    stop: StopFlag,
    says: Reporter,
    *,
    strict: bool,
) -> Outcome:
    from tuner.search.run import tune

    device, store = session.device, session.store
    if skip_current:
        current = store.winner(task.problem, device.model.slug)
        # A winner measured with other software, or replayed where there is a GPU, is found again.
        if (
            current is not None
            and current.environment.same_software(device.environment)
            and current.replayed == device.replayed
        ):
            return Outcome(task=task, status=Status.CURRENT, result=current)

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
            device=device,
            store=store,
            builder=session.builder,
            ranker=session.ranker,
            effort=effort,
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
