"""`gemmsmith jobs`: tuning jobs of a service, or of the local database; look, cancel, retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from service.cli.options import AsJson, Database, Url, connect, load_settings
from service.cli.output import MisuseError, emit, microseconds, note, say, table

if TYPE_CHECKING:
    from gemmsmith.client import Client
    from gemmsmith.errors import Busy
    from gemmsmith.jobs import JobStatus
    from tuner.jobs import Job, Queue

app = typer.Typer(help="Tuning jobs: list, show, cancel and retry them.", no_args_is_help=True)

Identifier = Annotated[str, typer.Argument(metavar="ID", help="The job's identifier.")]


def tell_busy(busy: Busy) -> None:
    """Say that an order is refused for now, and when it is sent again."""
    note(f"  {busy.title.lower()}; ordering again in {busy.retry_after:.0f} s")


@app.command("list")
def list_(
    state: Annotated[
        str | None,
        typer.Option(
            help="Only these: waiting, running, done, failed or cancelled.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    url: Url = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from gemmsmith.tuning import JobState

    if state is not None and state not in set(JobState):
        raise MisuseError(f"state must be one of {', '.join(JobState)}, got {state!r}")
    with _opened(url, database) as jobs:
        found = jobs.list(state, limit)
    if as_json:
        emit({"jobs": found})
        return
    columns = ("job", "state", "problem", "effort", "phase", "best µs", "tries", "created")
    table("", columns, map(_row, found), left=5)
    note(f"{len(found)} jobs" + (f" (--limit {limit})" if len(found) == limit else ""))


@app.command("show")
def show(
    job: Identifier, url: Url = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Print how far a job is, or how it ended."""
    with _opened(url, database) as jobs:
        _print(jobs.show(job), as_json)


@app.command("cancel")
def cancel(
    job: Identifier, url: Url = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Stop a job: at once while it waits, else after its current candidate. Trials are kept."""
    with _opened(url, database) as jobs:
        _print(jobs.cancel(job), as_json)


@app.command("retry")
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
    """Order anew what a job failed to do, or was cancelled before; prints the new job."""
    with _opened(url, database) as jobs:
        _print(jobs.retry(job, time_limit), as_json)


class _Jobs(Protocol):
    """What the commands need, wherever the jobs are."""

    def list(self, state: str | None, limit: int) -> list[JobStatus]: ...
    def show(self, job: str) -> JobStatus: ...
    def cancel(self, job: str) -> JobStatus: ...
    def retry(self, job: str, time_limit: float) -> JobStatus: ...


class _OfService:
    def __init__(self, client: Client) -> None:
        self._client = client

    def show(self, job: str) -> JobStatus:
        return self._client.job_status(job)

    def cancel(self, job: str) -> JobStatus:
        return self._client.cancel(job)

    def retry(self, job: str, time_limit: float) -> JobStatus:
        return self._client.retry(job, timeout=time_limit, on_busy=tell_busy).status

    def list(self, state: str | None, limit: int) -> list[JobStatus]:
        return [*self._client.jobs(state=state, limit=limit)]


class _OfDatabase:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def show(self, job: str) -> JobStatus:
        return _status(self._queue.get(job))

    def cancel(self, job: str) -> JobStatus:
        return _status(self._queue.cancel(job))

    def retry(self, job: str, time_limit: float) -> JobStatus:  # noqa: ARG002 - nobody to wait for
        return _status(self._queue.retry(job)[0])

    def list(self, state: str | None, limit: int) -> list[JobStatus]:
        from gemmsmith.tuning import JobState

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
        yield _OfDatabase(Queue(store, limit=settings.queue_limit))


def _status(job: Job) -> JobStatus:
    """The job as the service would tell it."""
    import msgspec

    from gemmsmith.jobs import JobStatus
    from service.http import documents

    return msgspec.convert(documents.job(job), JobStatus)


def _row(status: JobStatus) -> tuple[object, ...]:
    return (
        status.id,
        status.state,
        status.problem,
        status.effort,
        status.phase,
        microseconds(status.best_us),
        status.attempt,
        status.created_at,
    )


def _print(status: JobStatus, as_json: bool) -> None:
    if as_json:
        emit(status)
        return
    say(f"{status.id}  {status.state}")
    lines = {
        "problem": f"{status.problem}, effort {status.effort}",
        "device": status.device,
        "ordered by": status.ordered_by,
        "progress": status.phase and f"{status.phase} {status.done}/{status.total}",
        "best": status.best_us and f"{status.best_us:.2f} µs, {status.best}",
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
            say(f"  {name:<11}{value}")
