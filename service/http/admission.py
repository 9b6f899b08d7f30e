"""Orders of tuning jobs, by whatever route they come: who orders, how they are refused, answered.

An order that finds no room gets a 429 whose `Retry-After` says, in seconds, when there is likely to
be some; nothing was ordered, so that it can be sent again as it is, Idempotency-Key included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import structlog
from fastapi import Depends, Header
from starlette.responses import Response

from service import documents
from service.errors import ProblemError, invalid_field
from service.http.access import LOCAL, Caller
from service.http.state import State
from tuner.errors import QueueFull, QuotaUsedUp
from tuner.jobs import Job

_MAX_KEY = 200

log = structlog.get_logger("gemmsmith.service")


def key_name(caller: Caller) -> str | None:
    """What the jobs of an order are counted under; None where no keys are asked for."""
    return None if caller is LOCAL else caller.name


@contextmanager
def refused_without_room(service: State, caller: Caller) -> Iterator[None]:
    """Turn the queue's refusals into problem documents that say when to come again."""
    try:
        yield
    except QueueFull as error:
        raise _busy("queue-full", "The queue is full", error, service.queue.pause_s()) from error
    except QuotaUsedUp as error:
        pause_s = service.queue.pause_s(key_name(caller))
        raise _busy("quota-used-up", "The key's job limit is reached", error, pause_s) from error


def accepted(job: Job, *, created: bool) -> Response:
    """202 for a new job, 200 for one that was there."""
    log.info("job_ordered", job=job.id, problem=str(job.problem), new=created)
    return documents.json_response(
        documents.job(job),
        status=202 if created else 200,
        headers={"Location": f"/jobs/{job.id}"},
    )


async def _idempotency_key(
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Makes repeated requests safe: the same key never creates a second job",
            json_schema_extra={"pattern": f"^[!-~]([ -~]{{0,{_MAX_KEY - 2}}}[!-~])?$"},
        ),
    ] = None,
) -> str | None:
    if idempotency_key is not None and not (
        1 <= len(idempotency_key) <= _MAX_KEY
        and idempotency_key.isascii()
        and idempotency_key.isprintable()
    ):
        raise invalid_field(
            "Idempotency-Key", "is not valid", f"1 … {_MAX_KEY} printable ASCII characters"
        )
    return idempotency_key


IdempotencyKey = Annotated[str | None, Depends(_idempotency_key)]
"""The header of that name, checked, as a parameter of a route."""


def key_reused(job: Job) -> ProblemError:
    """The 422 of an Idempotency-Key that was sent before, for something else."""
    return ProblemError(
        status=422,
        kind="idempotency-key-reused",
        title="Idempotency-Key reused",
        detail=f"This key was sent before for another request, job {job.id}; use a new key.",
        links={"job": {"href": f"/jobs/{job.id}"}},
    )


def _busy(kind: str, title: str, error: Exception, pause_s: int) -> ProblemError:
    return ProblemError(
        status=429,
        kind=kind,
        title=title,
        detail=f"{error}.",
        links={"jobs": {"href": "/jobs?state=waiting"}},
        headers={"Retry-After": str(pause_s)},
    )
