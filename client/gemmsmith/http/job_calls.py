"""The calls of both clients about tuning jobs, except their events (`gemmsmith.http.events`)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from gemmsmith.answers import understood
from gemmsmith.answers.answer import TunedAnswer
from gemmsmith.core.problem import Problem
from gemmsmith.errors import Busy, NotUnderstood
from gemmsmith.http.jobs import JobStatus
from gemmsmith.http.listing import pages
from gemmsmith.http.lookups import best, check_same, history
from gemmsmith.http.replies import Response, check, read
from gemmsmith.http.requests import Query, Request, fields_of, get, job_path, post
from gemmsmith.http.retry import Patience
from gemmsmith.http.session import Session

LATEST = "latest"
"""Another identifier for the newest job."""

FULL = 429
"""The status of a request for a job if the queue is full or a key's quota is used up."""


async def tune(
    session: Session, problem: Problem, options: Mapping[str, Any], patience: Patience
) -> JobStatus:
    """`POST /tune`: a new job, or the waiting or running job for this problem."""
    request = post("/tune", {**fields_of(problem), **options})
    status = await _requested(session, request, patience)
    check_same("the job", "problem", status.problem, problem)
    return status


async def retry(session: Session, identifier: str, patience: Patience) -> JobStatus:
    request = Request(method="POST", path=f"{job_path(identifier)}/retry")
    return await _requested(session, request, patience)


async def _requested(session: Session, request: Request, patience: Patience) -> JobStatus:
    """Request a job until the queue has room for it, or `patience` ends and `Busy` is raised."""
    # The service returns the same job for all requests with the same key.
    request = request.with_header("idempotency-key", uuid.uuid4().hex)
    policy = session.retry
    if patience.left() != 0.0:
        # This loop waits for a full queue instead of the retry policy, because it reports waits.
        policy = replace(policy, statuses=policy.statuses - {FULL})
    while True:
        try:
            return read(check(await session.exchange(request, policy)), JobStatus)
        except Busy as busy:
            if busy.status != FULL:
                raise
            await session.sender.sleep(patience.pause(busy))


async def job(session: Session, identifier: str) -> JobStatus:
    return _job(await session.exchange(get(job_path(identifier))), identifier)


async def cancel(session: Session, identifier: str) -> JobStatus:
    request = Request(method="DELETE", path=job_path(identifier))
    response = check(await session.exchange(request))
    return _job(response, identifier) if response.body else await job(session, identifier)


def _job(response: Response, identifier: str) -> JobStatus:
    status = read(check(response), JobStatus)
    if identifier != LATEST:
        check_same("the job", "identifier", status.id, identifier)
    return status


async def jobs(
    session: Session, state: str | None, limit: int | None
) -> AsyncGenerator[JobStatus, None]:
    async for rows in pages(session, "/jobs", "jobs", {"state": state}, limit):
        for status in understood.each(rows, JobStatus, "jobs"):
            yield status


async def winner_of(session: Session, status: JobStatus, device: str | None) -> TunedAnswer:
    """The winner of a finished job, and what is served, both without the cache.

    Raises:
        NotUnderstood: only a newer gemmsmith can read the job's winner.
    """
    # A job may have a worker's name of a device (`cuda:0`, `replay:<file>`), unknown to lookups.
    if device is None and ":" not in status.device:
        device = status.device or None
    query = Query(problem=status.problem, device=device, exact=True)
    served = await best(session, query, fresh=True)
    number = status.winner_revision
    if number is None or number == served.revision:
        return TunedAnswer.of(served, served)
    revisions = await history(session, status.problem, served.device.slug, 1, before=number + 1)
    for revision in revisions:
        if revision.answer.revision == number:
            return TunedAnswer.of(revision.answer, served)
    reason = f"revision {number}, the winner of job {status.id}, needs a newer gemmsmith"
    raise NotUnderstood(200, "Not understood", reason)
