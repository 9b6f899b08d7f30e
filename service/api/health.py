"""`/healthz`, `/readyz` and `/metrics`: for whatever watches the service."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service import documents
from service.access import Scope, needs
from service.metrics import CONTENT_TYPE
from service.problems import ProblemError
from service.state import Service
from tuner import store

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers; says nothing about the database."""
    return documents.json_response({"status": "ok"})


@router.get("/readyz")
def readyz(service: Service) -> Response:
    """The database answers and has the schema that this version needs."""
    expected = store.head()
    current = store.current(service.settings.database)
    if current != expected:
        raise ProblemError(
            status=503,
            kind="schema-mismatch",
            title="Database schema mismatch",
            detail=f"The database is at {current}, this version needs {expected}: run "
            "`gemmsmith db upgrade`, or upgrade gemmsmith if the database is newer.",
            headers={"Retry-After": "30"},
        )
    return documents.json_response({"status": "ok", "schema": current})


@router.get("/metrics", dependencies=[needs(Scope.READ)])
def metrics(service: Service) -> Response:
    """Prometheus text format."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
