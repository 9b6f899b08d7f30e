"""`gemmsmith jobs`: tuning jobs of a service, or of the local database; watch, cancel, retry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from gemmsmith.core.choices import member
from gemmsmith.core.tuning import JobState
from service.cli import completion, follow
from service.cli.guard import example
from service.cli.options import AsJson, Database, Url, connect, load_settings
from service.cli.output import CommandError, emit, note, say, table
from service.cli.progress import TUNING, Reporter, reporter

if TYPE_CHECKING:
    from gemmsmith.errors import Busy
    from gemmsmith.http.client import Client
    from gemmsmith.http.jobs import JobStatus
    from tuner.jobs import Job, Queue

app = typer.Typer(
    help="Tuning jobs: list, watch, show, cancel and retry them.", no_args_is_help=True
)

LATEST = "latest"
"""The newest job, wherever an identifier is asked for."""

_LOOK_S = 0.5
"""How often a local database is asked about a watched job."""

Identifier = Annotated[str, typer.Argument(metavar="ID", help="The job's identifier.")]


def tell_busy(busy: Busy) -> None:
    """Say that a request is refused for now, and when it is sent again."""
    note(f"  {busy.title.lower()}; asking again in {busy.retry_after:.0f} s")


@app.command("list", epilog=example("jobs list --state failed"))
def list_(
    state: Annotated[
        str | None,
        typer.Option(
            help="Only these: waiting, running, done, failed or cancelled.",
            autocompletion=completion.states,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number.")] = 20,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    if state is not None:
        state = member("state", JobState, state)
    with _opened(url, database) as jobs:
        found = jobs.list(state, limit)
    if as_json:
        emit({"jobs": found})
        return
    columns = ("job", "state", "problem", "effort", "phase", "best", "tries", "created")
    table("", columns, map(_row, found), left=5)
    note(f"{len(found)} jobs" + (f" (--limit {limit})" if len(found) == limit else ""))


@app.command("show", epilog=example("jobs show latest"))
def show(
    job: Identifier, url: Url = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Print the status of a job."""
    with _opened(url, database) as jobs:
        _print(jobs.show(job), as_json)


@app.command("watch", epilog=example("jobs watch latest"))
def watch(
    job: Annotated[
        str, typer.Argument(metavar="[ID]", help="The job's identifier; default: the newest job.")
    ] = LATEST,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Follow a job with a progress bar until it ends; status 1 if it ends without a winner.

    Ctrl-C stops watching, and the job goes on.
    """
    with _opened(url, database) as jobs:
        status = jobs.show(job)
        try:
            if not status.state.terminal:
                with reporter(TUNING) as says:
                    says.overall(0, 1, str(status.problem))
                    status = jobs.watch(status.id, says)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(follow.abandoned([status.id], jobs.place)) from None
    _print(status, as_json)
    if status.state is not JobState.DONE:
        raise typer.Exit(1)


@app.command("cancel", epilog=example("jobs cancel 3f2a9c"))
def cancel(
    identifiers: Annotated[
        list[str], typer.Argument(metavar="ID...", help="The jobs' identifiers.")
    ],
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Cancel jobs: waiting ones at once, running ones after their current candidate."""
    with _opened(url, database) as jobs:
        found = [jobs.cancel(job) for job in identifiers]
    if as_json and len(found) > 1:
        emit({"jobs": found})
        return
    for status in found:
        _print(status, as_json)


@app.command("retry", epilog=example("jobs retry 3f2a9c"))
def retry(
    job: Identifier,
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="With --url: seconds to wait for room in a full queue."),
    ] = 0.0,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Request a failed or cancelled job again, as a new job."""
    with _opened(url, database) as jobs:
        _print(jobs.retry(job, time_limit), as_json)


class _Jobs(Protocol):
    """What the commands need, wherever the jobs are; `place` is the option that says where."""

    place: Sequence[str]

    def list(self, state: str | None, limit: int) -> list[JobStatus]: ...
    def show(self, job: str) -> JobStatus: ...
    def watch(self, job: str, says: Reporter) -> JobStatus: ...
    def cancel(self, job: str) -> JobStatus: ...
    def retry(self, job: str, time_limit: float) -> JobStatus: ...


class _OfService:
    def __init__(self, client: Client) -> None:
        self._client = client
        self.place: Sequence[str] = ("--url", client.url)

    def show(self, job: str) -> JobStatus:
        return self._client.job_status(job)

    def watch(self, job: str, says: Reporter) -> JobStatus:
        followed = self._client.job(job)
        with follow.waiting(lambda: self.show(job), self.place, says):
            for _ in followed.events():
                follow.show(followed.status, says)
        return followed.refresh()

    def cancel(self, job: str) -> JobStatus:
        return self._client.cancel(job)

    def retry(self, job: str, time_limit: float) -> JobStatus:
        return self._client.retry(job, timeout=time_limit, on_busy=tell_busy).status

    def list(self, state: str | None, limit: int) -> list[JobStatus]:
        return [*self._client.jobs(state=state, limit=limit)]


class _OfDatabase:
    def __init__(self, queue: Queue, database: str | None) -> None:
        self._queue = queue
        self.place: Sequence[str] = ("--database", database) if database else ()

    def show(self, job: str) -> JobStatus:
        found = self._found(job)
        if found.state is not JobState.WAITING:
            return _status(found)
        from service.report.waiting import waiting

        return _status(found, waiting(found, self._queue.workers.alive()))

    def watch(self, job: str, says: Reporter) -> JobStatus:
        with follow.waiting(lambda: self.show(job), self.place, says):
            while not (status := _status(self._queue.get(job))).state.terminal:
                follow.show(status, says)
                time.sleep(_LOOK_S)
        return status

    def _found(self, job: str) -> Job:
        if job != LATEST:
            return self._queue.get(job)
        newest = self._queue.list(None, limit=1)
        if not newest:
            raise CommandError("this database has no jobs")
        return newest[0]

    def cancel(self, job: str) -> JobStatus:
        return _status(self._queue.cancel(job))

    def retry(self, job: str, time_limit: float) -> JobStatus:  # noqa: ARG002 - nobody to wait for
        return _status(self._queue.retry(job)[0])

    def list(self, state: str | None, limit: int) -> list[JobStatus]:
        wanted = None if state is None else JobState(state)
        return [_status(job) for job in self._queue.list(wanted, limit=limit)]


@contextmanager
def _opened(url: str | None, database: str | None) -> Iterator[_Jobs]:
    if url:
        with connect(url) as client:
            yield _OfService(client)
        return
    from tuner.jobs import Queue
    from tuner.store import Store

    settings = load_settings(database=database)
    with Store.open(settings.database) as store:
        yield _OfDatabase(Queue(store, limit=settings.queue_limit), database)


def _status(job: Job, waits: str = "") -> JobStatus:
    """The job as the service would tell it."""
    import msgspec

    from gemmsmith.http.jobs import JobStatus
    from service.http import documents

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


def _print(status: JobStatus, as_json: bool) -> None:
    if as_json:
        emit(status)
        return
    say(f"{status.id}  {status.state}" + (f"  ({status.waits})" if status.waits else ""))
    lines = {
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
    for name, value in lines.items():
        if value:
            say(f"  {name:<13}{value}")
