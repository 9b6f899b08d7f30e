"""`POST /tune`: request a tuning job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from service.http.access import Caller, Scope, needs
from service.http.admission import (
    IdempotencyKey,
    accepted,
    key_name,
    key_reused,
    refused_without_room,
)
from service.http.requests import TuneBody
from service.http.state import Service
from service.lookup.devices import check_fits
from tuner.search import demand

router = APIRouter(tags=["tuning"])


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
    with refused_without_room(service, caller):
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
        raise key_reused(job)
    return accepted(job, created=created)
