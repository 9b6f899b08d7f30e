"""`POST /tune`: order a tuning job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header
from starlette.responses import Response

from service import documents
from service.catalogue import check_fits
from service.problems import ProblemError, invalid_field
from service.schemas import TuneBody
from service.state import Service
from tuner.search import demand

router = APIRouter(tags=["tuning"])

_MAX_KEY = 200


@router.post("/tune", status_code=202)
def tune(
    service: Service,
    body: TuneBody,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Response:
    """Order a tuning job: 202 for a new one, 200 for the one that already does this.

    The job's `calls` are those of all orders that joined it, and its `expected_saving_us` what
    tuning is expected to save in them together, in microseconds: null while there are none. An
    order that is repeated with its Idempotency-Key adds nothing.
    """
    if idempotency_key is not None and not _is_key(idempotency_key):
        raise invalid_field(
            "Idempotency-Key", "is not usable", f"1 … {_MAX_KEY} printable ASCII characters"
        )
    problem = body.problem()
    model = service.catalogue.resolve(None, body.device)
    check_fits(problem, model, measured=True)
    job, created = service.queue.enqueue(
        problem,
        effort=body.effort,
        device=body.device,
        priority=body.priority,
        calls=body.calls,
        saving_us=demand.estimate(service.store, problem, model),
        idempotency_key=idempotency_key,
    )
    if (job.problem, job.effort, job.device) != (problem, body.effort, body.device):
        raise ProblemError(
            status=422,
            kind="idempotency-key-reused",
            title="Idempotency-Key reused",
            detail=f"This key was sent before for another order, job {job.id}; use a new key.",
            links={"job": {"href": f"/jobs/{job.id}"}},
        )
    return documents.json_response(
        documents.job(job),
        status=202 if created else 200,
        headers={"Location": f"/jobs/{job.id}"},
    )


def _is_key(key: str) -> bool:
    return 1 <= len(key) <= _MAX_KEY and key.isascii() and key.isprintable()
