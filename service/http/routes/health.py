"""`/healthz`, `/readyz` and `/metrics`: for whatever watches the service."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from service.http import documents
from service.http.access import Scope, needs
from service.http.errors import ProblemError
from service.http.state import Service
from service.metrics.prometheus import CONTENT_TYPE
from tuner import store
from tuner.errors import DatabaseBusy, StoreError
from tuner.store.probe import probe

router = APIRouter(tags=["health"])

PACKS_NEED_BYTES = 100_000_000
"""Free space below which the packs' disk counts as full: a few tuned problems' packs."""

_OK = "ok"


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
def readyz(service: Service) -> Response:
    """Whether the database has the schema that this version needs and can be written.

    `checks` says how each check went. The status is `degraded`, and the service ready, while
    lookups are answered as ever: somebody else is writing for long, or there is no room for packs.
    """
    url = service.settings.database
    expected = store.head()
    try:
        current = store.current(url)
    except StoreError as error:
        raise _unusable(error, {"database": str(error)}) from error
    if current != expected:
        detail = (
            f"The database is at {current}, this version needs {expected}: run "
            "`gemmsmith db upgrade`, or upgrade gemmsmith if the database is newer."
        )
        raise _NotReadyError(
            status=503,
            kind="schema-mismatch",
            title="Database schema mismatch",
            detail=detail,
            headers={"Retry-After": "30"},
            checks={"database": _OK, "schema": detail},
        )
    checks = {"database": _OK, "schema": _OK, "packs": _packs(service.settings.packs)}
    try:
        probe(url)
    except DatabaseBusy:
        checks["database"] = "busy: somebody else has been writing for seconds"
    except StoreError as error:
        raise _unusable(error, {**checks, "database": str(error)}) from error
    status = "ok" if set(checks.values()) == {_OK} else "degraded"
    return documents.json_response({"status": status, "schema": current, "checks": checks})


@router.get("/metrics", dependencies=[needs(Scope.READ)])
def metrics(service: Service) -> Response:
    """Prometheus text format."""
    return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _unusable(error: StoreError, checks: Mapping[str, str]) -> _NotReadyError:
    return _NotReadyError(
        status=503,
        kind="store-unavailable",
        title="The database cannot be used",
        detail=str(error),
        headers={"Retry-After": "5"},
        checks=checks,
    )


def _packs(folder: Path) -> str:
    if not folder.is_dir():
        return "the packs folder is missing: packs can be neither served nor compiled"
    if not os.access(folder, os.W_OK):
        return "the packs folder cannot be written: no pack can be compiled"
    free = shutil.disk_usage(folder).free
    if free < PACKS_NEED_BYTES:
        return f"{free / 1e6:.0f} MB are left for packs, less than {PACKS_NEED_BYTES / 1e6:.0f}"
    return _OK
