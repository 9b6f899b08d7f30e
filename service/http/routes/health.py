"""`/healthz`, `/readyz` and `/metrics`: for whatever watches the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from service import documents
from service.errors import ProblemError
from service.http.access import Scope, needs
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
    """Answers while the process runs; does not check the database."""
    return documents.json_response({"status": "ok"})


@router.get("/readyz")
async def readyz(service: Service, request: Request) -> Response:
    """Whether the database is writable and has the schema that this version needs.

    `checks` has the result of each check, at most a second old; the test write is at most ten
    seconds old. The status is `degraded`, and the service still ready, if lookups work but another
    process has held the write lock for long, or there is no space for packs. The database's error
    message is included for requests with a key.
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
