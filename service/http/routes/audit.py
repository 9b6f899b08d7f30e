"""`GET /audit`: who changed what is served, or who may come in."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from service import documents
from service.http.access import Scope, needs
from service.http.requests import AuditQuery
from service.http.routes.paging import next_page
from service.http.state import Service

router = APIRouter(tags=["access"])


@router.get("/audit", dependencies=[needs(Scope.ADMIN)])
def audit(service: Service, query: Annotated[AuditQuery, Query()]) -> Response:
    """The audit log, newest first; `links.next` has the older entries."""
    entries = service.store.audit.entries(
        action=query.action, actor=query.actor, after=query.after, limit=query.limit
    )
    following = next_page("/audit", query, entries, lambda last: last.id)
    listed = [
        {**msgspec.to_builtins(entry), "at": documents.timestamp(entry.at)} for entry in entries
    ]
    return documents.page("entries", listed, following)
