"""`gemmsmith jobs`: tuning jobs of a service, or of the local database; watch, cancel, retry."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from gemmsmith.core.choices import member
from gemmsmith.core.tuning import JobState
from gemmsmith.errors import GemmsmithError
from service.cli.options import SourceOptions, complete_states
from service.cli.output import (
    TUNING,
    CommandError,
    Reporter,
    Result,
    counted_rows,
    note,
    reporter,
    table,
)
from service.cli.session import opened
from tuner.errors import TunerError

if TYPE_CHECKING:
    from gemmsmith.errors import Busy
    from gemmsmith.http.client import Client
    from gemmsmith.http.jobs import JobStatus
    from service.settings import Settings
    from tuner.jobs import Job
    from tuner.store import Store

LATEST = "latest"
"""The newest job, as an identifier."""

LOOK_S = 0.5
"""Seconds between two reads of a local database about a watched job."""

PATIENCE_S = 3.0
"""A living worker takes a waiting job within a second; a job that waits longer is worth a line."""

Identifier = Annotated[str, typer.Argument(metavar="ID", help="The job's identifier.")]


def list_(
    state: Annotated[
        str | None,
        typer.Option(
            help="Only these: waiting, running, done, failed or cancelled.",
            autocompletion=complete_states,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number.")] = 20,
    *,
    source: SourceOptions,
) -> Result:
    """List jobs, newest first."""
    if state is not None:
        state = member("state", JobState, state)
    with opened(source, _LocalJobs) as jobs:
        statuses = [*jobs.jobs(state=state, limit=limit)]
    columns = ("job", "state", "problem", "effort", "phase", "best", "tries", "created")
    return Result(
        {"jobs": statuses},
        lambda: table("", columns, map(_row, statuses), left=5),
        [counted_rows(statuses, limit, "jobs")],
    )


def show(job: Identifier, source: SourceOptions) -> Result:
    """Print the status of a job."""
    with opened(source, _LocalJobs) as jobs:
        return _result(jobs.job_status(job))


def watch(
    job: Annotated[
        str, typer.Argument(metavar="[ID]", help="The job's identifier; default: the newest job.")
    ] = LATEST,
    *,
    source: SourceOptions,
) -> Result:
    """Follow a job with a progress bar until it ends; status 1 if it ends without a winner.

    Ctrl-C stops watching, and the job goes on.
    """
    with opened(source, _LocalJobs) as jobs:
        status = jobs.job_status(job)
        try:
            if not status.state.terminal:
                identifier = status.id
                with (
                    reporter(TUNING) as says,
                    waiting(lambda: jobs.job_status(identifier), source.words, says),
                ):
                    says.overall(0, 1, str(status.problem))
                    status = _follow(jobs, identifier, says)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(abandoned([status.id], source.words)) from None
    return replace(_result(status), failed=status.state is not JobState.DONE)


def cancel(
    identifiers: Annotated[
        list[str], typer.Argument(metavar="ID...", help="The jobs' identifiers.")
    ],
    source: SourceOptions,
) -> Result:
    """Cancel jobs: waiting ones at once, running ones after their current candidate."""
    with opened(source, _LocalJobs) as jobs:
        statuses = [jobs.cancel(job) for job in identifiers]
    lines = [line for status in statuses for line in _lines(status)]
    return Result({"jobs": statuses} if len(statuses) > 1 else statuses[0], lines)


def retry(
    job: Identifier,
    time_limit: Annotated[
        float, typer.Option(min=0, help="With --url: seconds to wait for room in a full queue.")
    ] = 0.0,
    *,
    source: SourceOptions,
) -> Result:
    """Request a failed or cancelled job again, as a new job."""
    with opened(source, _LocalJobs) as jobs:
        if isinstance(jobs, _LocalJobs):  # where a full queue is an error
            return _result(jobs.retry(job))
        return _result(jobs.retry(job, timeout=time_limit, on_busy=say_busy).status)


def say_busy(busy: Busy) -> None:
    note(f"  {busy.title.lower()}; asking again in {busy.retry_after:.0f} s")


def show_progress(status: JobStatus, says: Reporter) -> None:
    says.update(status.phase or status.state, status.done, status.total, best=status.best_time)


def _cancelling(jobs: Sequence[str], place: Sequence[str]) -> str:
    return shlex.join(["gemmsmith", "jobs", "cancel", *jobs, *place])


def abandoned(jobs: Sequence[str], place: Sequence[str]) -> str:
    """The message for a user who stops waiting for these jobs."""
    if not jobs:
        return "interrupted: all jobs have ended"
    goes_on = "the job goes on" if len(jobs) == 1 else f"{len(jobs)} jobs go on"
    return f"interrupted: {goes_on}; to cancel: {_cancelling(jobs, place)}"


@contextmanager
def waiting(
    status_of: Callable[[], JobStatus], place: Sequence[str], says: Reporter
) -> Iterator[None]:
    """Meanwhile, a thread says what the job waits for, whenever that has changed."""
    over = threading.Event()

    # A thread, since the command itself is blocked by the stream of the job's events.
    def watch() -> None:
        said = ""
        while not over.wait(PATIENCE_S):
            try:
                status = status_of()
            except (GemmsmithError, TunerError):
                continue  # the command itself gets this error, and reports it
            if status.waits and status.waits != said and not over.is_set():
                said = status.waits
                says.line(f"  {said}. To cancel: {_cancelling([status.id], place)}")

    thread = threading.Thread(target=watch, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(jobs: Client | _LocalJobs, job: str, says: Reporter) -> JobStatus:
    """Show the progress of a job until it ends."""
    if isinstance(jobs, _LocalJobs):
        while not (status := jobs.job_status(job)).state.terminal:
            show_progress(status, says)
            time.sleep(LOOK_S)
        return status
    handle = jobs.job(job)
    for _ in handle.events():
        show_progress(handle.status, says)
    return handle.refresh()


class _LocalJobs:
    """The jobs of the local database, with the calls of a service's client."""

    def __init__(self, store: Store, settings: Settings) -> None:
        from tuner.jobs import Queue

        self._queue = Queue(store, limit=settings.queue_limit)

    def job_status(self, job: str) -> JobStatus:
        jobs = self._queue.list(None, limit=1) if job == LATEST else [self._queue.get(job)]
        if not jobs:
            raise CommandError("this database has no jobs")
        current = jobs[0]
        if current.state is not JobState.WAITING:
            return _status(current)
        from service.report.waiting import waiting as reason

        return _status(current, reason(current, self._queue.workers.alive()))

    def cancel(self, job: str) -> JobStatus:
        return _status(self._queue.cancel(job))

    def retry(self, job: str) -> JobStatus:
        return _status(self._queue.retry(job)[0])

    def jobs(self, state: str | None, limit: int) -> list[JobStatus]:
        only = None if state is None else JobState(state)
        return [_status(job) for job in self._queue.list(only, limit=limit)]


def _status(job: Job, waits: str = "") -> JobStatus:
    """The job as the service would report it."""
    import msgspec

    from gemmsmith.http.jobs import JobStatus
    from service import documents

    return msgspec.convert(documents.job(job, waits), JobStatus)


def _row(status: JobStatus) -> tuple[object, ...]:
    return (
        status.id,
        status.state,
        status.problem,
        status.effort,
        status.phase,
        status.best_time or None,
        status.attempt,
        status.created_at,
    )


def _result(status: JobStatus) -> Result:
    return Result(status, _lines(status))


def _lines(status: JobStatus) -> list[str]:
    waits = f"  ({status.waits})" if status.waits else ""
    fields = {
        "problem": f"{status.problem}, effort {status.effort}",
        "device": status.device,
        "requested by": status.ordered_by,
        "progress": status.phase and f"{status.phase} {status.done}/{status.total}",
        "best": status.best_us and f"{status.best_time}, {status.best}",
        "winner": status.winner_revision and f"revision {status.winner_revision}",
        "attempts": status.attempt,
        "created": status.created_at,
        "started": status.started_at,
        "ended": status.finished_at,
        "deadline": status.deadline_at,
        "error": status.error,
    }
    shown = [f"  {name:<13}{value}" for name, value in fields.items() if value]
    return [f"{status.id}  {status.state}{waits}", *shown]
