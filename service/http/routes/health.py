"""`/healthz`, `/readyz` and `/metrics`: for whatever watches the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.http import documents
from service.http.access import Scope, needs
from service.http.errors import ProblemError
from service.http.state import Service
from service.metrics.prometheus import CONTENT_TYPE

router = APIRouter(tags=["health"])

_TITLES = {
    "schema-mismatch": "Database schema mismatch",
    "store-unavailable": "The database cannot be used",
}
_RETRY_AFTER = {"schema-mismatch": "30", "store-unavailable": "5"}


@dataclass(kw_only=True)
class _NotReadyError(ProblemError):
    """A 503 that says of each check how it went."""

    checks: Mapping[str, str]

    def document(self, instance: str) -> dict[str, Any]:
        return {**super().document(instance), "checks": self.checks}


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers; says nothing about the database."""
    return documents.json_response({"status": "ok"})


@router.get("/readyz")
async def readyz(service: Service, request: Request) -> Response:
    """Whether the database has the schema that this version needs and can be written.

    `checks` says how each check went, and is a second old at most; whether the database can be
    written, ten. The status is `degraded`, and the service ready, while lookups are answered as
    ever: somebody else is writing for long, or there is no room for packs. What the database says
    is told to those who may read.
    """
    report = await service.readiness.report()
    if not service.access.admits(request.scope, Scope.READ):
        report = report.for_strangers()
    if not report.is_ready:
        raise _NotReadyError(
            status=503,
            kind=report.status,
            title=_TITLES[report.status],
            detail=report.detail,
            headers={"Retry-After": _RETRY_AFTER[report.status]},
            checks=report.checks,
        )
    return documents.json_response(
        {"status": report.status, "schema": report.schema, "checks": report.checks}
    )


@router.get("/metrics", dependencies=[needs(Scope.READ)])
def metrics(service: Service) -> Response:
    """Prometheus text format."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
