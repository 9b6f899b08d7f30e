"""`POST /tune` and `/jobs`: tuning jobs, from the request to the end.

A request that finds no room gets a 429 whose `Retry-After` says, in seconds, when there is likely
to be some; nothing was changed, so it can be sent again as it is, Idempotency-Key included.

An event stream sends every event after the client's `Last-Event-ID` from the database, so it
resumes where it broke, on any server process; it ends after the job's last event. `latest` in place
of an id means the newest job. When a client learns that a job is over, the next lookup has its
winner. `service.http.streams` feeds all streams.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from gemmsmith.core.tuning import JobState
from service import documents
from service.errors import ProblemError, invalid_field, not_found
from service.http.access import LOCAL, Caller, Scope, needs, whose
from service.http.middleware import STREAMED
from service.http.parameters import Number
from service.http.requests import JobsQuery, TuneBody
from service.http.routes.paging import filled, next_page
from service.http.state import Service, State
from service.lookup.abilities import EVERYTHING, Abilities, Asking
from service.lookup.devices import check_fits
from service.report.waiting import waiting
from tuner.errors import JobNotFound, NotRetryable, QueueFull, QuotaUsedUp
from tuner.jobs import Job
from tuner.search import demand

router = APIRouter(tags=["tuning"])

_MAX_KEY = 200
_IDEMPOTENCY_KEY = re.compile(f"[!-~]([ -~]{{0,{_MAX_KEY - 2}}}[!-~])?")

_EVENT_ID = re.compile("[0-9]{0,9}")

log = structlog.get_logger("gemmsmith.service")


async def _idempotency_key(
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Makes repeated requests safe: the same key never creates a second job",
            json_schema_extra={"pattern": f"^{_IDEMPOTENCY_KEY.pattern}$"},
        ),
    ] = None,
) -> str | None:
    if idempotency_key is not None and not _IDEMPOTENCY_KEY.fullmatch(idempotency_key):
        raise invalid_field(
            "Idempotency-Key", "is not valid", f"1 … {_MAX_KEY} printable ASCII characters"
        )
    return idempotency_key


IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]
"""The header of that name, checked, as a parameter of a route."""


@router.post("/tune", status_code=202)
def tune(
    service: Service,
    caller: Annotated[Caller, needs(Scope.TUNE)],
    body: TuneBody,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Request a tuning job: 202 for a new job, 200 for an existing one that already does this.

    The job's `calls` are the sum of all requests that joined it. Its `expected_saving_us` is the
    time that tuning is expected to save in all these calls, in microseconds; null without calls.
    Repeating a request with its Idempotency-Key adds nothing. If the queue is full, or the key has
    reached its limit of jobs, new jobs are refused with a 429: send the request again after
    `Retry-After` seconds.
    """
    problem = body.problem()
    model = service.catalogue.resolve(None, body.device)
    device = model.slug if model and body.device else ""
    check_fits(problem, model, measured=True)
    with _refused_without_room(service, caller):
        job, created = service.queue.enqueue(
            problem,
            effort=body.effort,
            device=device,
            priority=body.priority,
            calls=body.calls,
            saving_us=demand.estimate(service.store, problem, model),
            deadline_s=body.deadline_s,
            ordered_by=key_name(caller),
            job_limit=caller.job_limit,
            idempotency_key=idempotency_key,
        )
    if (job.problem, job.effort, job.device) != (problem, body.effort, device):
        raise _key_reused(job)
    return _accepted(job, created=created)


@router.get("/jobs", dependencies=[needs(Scope.READ)])
def list_jobs(service: Service, asking: Asking, query: Annotated[JobsQuery, Query()]) -> Response:
    """Jobs, newest first; `links.next` has the older ones."""
    try:
        jobs = _jobs(service, asking, query.state, query.after, query.limit)
    except JobNotFound as error:
        raise invalid_field("after", f"{error}", "the `after` of a page's `links.next`") from None
    if any(job.state.terminal for job in jobs):
        service.catch_up()
    following = next_page("/jobs", query, jobs, lambda last: last.id)
    return documents.page("jobs", map(documents.job, jobs), following)


@router.get("/jobs/{job_id}", dependencies=[needs(Scope.READ)])
def get_job(service: Service, asking: Asking, job_id: str) -> Response:
    """One job: its state, its progress, and the best time so far.

    `waits` says what a waiting job waits for, and whether a worker is alive that can take it.
    """
    job = _get(service, job_id, asking)
    waits = waiting(job, service.queue.workers.alive()) if job.state is JobState.WAITING else ""
    return documents.json_response(documents.job(job, waits), headers={"Cache-Control": "no-cache"})


@router.delete("/jobs/{job_id}", status_code=202)
def cancel_job(
    service: Service, caller: Annotated[Caller, needs(Scope.TUNE)], job_id: str
) -> Response:
    """Cancel a job: a waiting one at once, a running one after its current candidate.

    A job that has ended does not change. Trials are kept. Only an admin key can cancel the job of
    another key.
    """
    job = _get(service, job_id)
    _need_right(caller, job)
    service.queue.cancel(job.id, actor=caller.name)
    return documents.json_response(documents.job(_get(service, job_id)), status=202)


@router.post("/jobs/{job_id}/retry", status_code=202)
def retry_job(
    service: Service,
    caller: Annotated[Caller, needs(Scope.TUNE)],
    job_id: str,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Request a failed or cancelled job again; answers as `POST /tune`.

    The new job has the old one's problem, effort, device, priority and calls, and no deadline. A
    job that succeeded or has not ended gets a 409. Only an admin key can retry the job of another
    key.
    """
    old = _get(service, job_id)
    _need_right(caller, old)
    try:
        with _refused_without_room(service, caller):
            job, created = service.queue.retry(
                old.id,
                ordered_by=key_name(caller),
                job_limit=caller.job_limit,
                idempotency_key=idempotency_key,
            )
    except NotRetryable as error:
        raise ProblemError(
            status=409,
            kind="not-retryable",
            title="Nothing to retry",
            detail=f"{error}.",
            links={"job": {"href": f"/jobs/{old.id}"}},
        ) from error
    if (job.problem, job.effort, job.device) != (old.problem, old.effort, old.device):
        raise _key_reused(job)
    return _accepted(job, created=created)


@router.get("/jobs/{job_id}/events")
def job_events(
    service: Service,
    request: Request,
    caller: Annotated[Caller, needs(Scope.READ)],
    job_id: str,
    after: Annotated[Number, Query(description="Event to continue after")] = 0,
    last_event_id: Annotated[
        str | None,
        Header(
            description="As `after`, and takes precedence",
            json_schema_extra={"pattern": f"^{_EVENT_ID.pattern}$"},
        ),
    ] = None,
) -> Response:
    """The job's events from the first (or from `Last-Event-ID`) to its end, as they happen."""
    job = _get(service, job_id)
    if last_event_id:
        if not _EVENT_ID.fullmatch(last_event_id):
            raise invalid_field("Last-Event-ID", "is not an event's id", "an id from this stream")
        after = int(last_event_id)
    is_welcome = partial(service.access.admits, request.scope, Scope.READ)
    return _EventStream(
        service.streams.events(job.id, after, is_welcome),
        admitted=service.streams.admitted(whose(caller, request.scope)),
    )


class _EventStream(StreamingResponse):
    """An answer without end: a problem document instead where `admitted` refuses it."""

    def __init__(
        self, content: AsyncIterator[bytes], *, admitted: AbstractContextManager[None]
    ) -> None:
        super().__init__(
            content,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._admitted = admitted

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        with ExitStack() as streaming:
            try:
                streaming.enter_context(self._admitted)
            except ProblemError as refusal:
                await refusal.response(scope["path"])(scope, receive, send)
                return
            scope[STREAMED] = True
            await super().__call__(scope, receive, send)


def key_name(caller: Caller) -> str | None:
    """What the jobs of an order are counted under; None where no keys are asked for."""
    return None if caller is LOCAL else caller.name


@contextmanager
def _refused_without_room(service: State, caller: Caller) -> Iterator[None]:
    """Turn the queue's refusals into problem documents that say when to come again."""
    try:
        yield
    except QueueFull as error:
        raise _no_room("queue-full", "The queue is full", error, service.queue.pause_s()) from error
    except QuotaUsedUp as error:
        pause_s = service.queue.pause_s(key_name(caller))
        raise _no_room("quota-used-up", "The key's job limit is reached", error, pause_s) from error


def _accepted(job: Job, *, created: bool) -> Response:
    """202 for a new job, 200 for one that was there."""
    log.info("job_ordered", job=job.id, problem=str(job.problem), new=created)
    return documents.json_response(
        documents.job(job),
        status=202 if created else 200,
        headers={"Location": f"/jobs/{job.id}"},
    )


def _key_reused(job: Job) -> ProblemError:
    """The 422 of an Idempotency-Key that was sent before, for something else."""
    return ProblemError(
        status=422,
        kind="idempotency-key-reused",
        title="Idempotency-Key reused",
        detail=f"This key was sent before for another request, job {job.id}; use a new key.",
        links={"job": {"href": f"/jobs/{job.id}"}},
    )


def _no_room(kind: str, title: str, error: Exception, pause_s: int) -> ProblemError:
    return ProblemError(
        status=429,
        kind=kind,
        title=title,
        detail=f"{error}.",
        links={"jobs": {"href": "/jobs?state=waiting"}},
        headers={"Retry-After": str(pause_s)},
    )


def may_change(caller: Caller, job: Job) -> bool:
    """Whether the job is the caller's own, even if others joined it, or the caller an admin."""
    return Scope.ADMIN in caller.scopes or job.ordered_by == key_name(caller)


def _need_right(caller: Caller, job: Job) -> None:
    if not may_change(caller, job):
        raise ProblemError(
            status=403,
            kind="forbidden",
            title="Job of another key",
            detail=f"The job was not requested with the API key {caller.name!r}. Only the key that "
            "requested it, or one with the scope admin, may cancel or retry it. To tune the "
            "problem, request it: POST /tune.",
            links={"tune": {"href": "/tune", "method": "POST"}},
        )


def _jobs(
    service: State, asking: Abilities, state: JobState | None, after: str | None, limit: int
) -> list[Job]:
    return filled(
        partial(service.queue.list, state=state, limit=limit),
        lambda job: asking.knows(job.problem),
        cursor=lambda last: last.id,
        after=after,
        limit=limit,
    )


def _get(service: State, job_id: str, asking: Abilities = EVERYTHING) -> Job:
    job = _find(service, job_id, asking)
    if job.state.terminal:
        service.catch_up()
    return job


def _find(service: State, job_id: str, asking: Abilities) -> Job:
    if job_id == "latest":
        newest = _jobs(service, asking, None, None, 1)
        if not newest:
            raise not_found("Job", "There are no jobs yet; request one with POST /tune.")
        return newest[0]
    try:
        job = service.queue.get(job_id)
    except JobNotFound:
        job = None
    if job is None or not asking.knows(job.problem):
        raise not_found("Job", f"There is no job {job_id!r:.80}.", {"jobs": {"href": "/jobs"}})
    return job
