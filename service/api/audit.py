"""`GET /audit`: who changed what is served, or who may come in."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from service import documents
from service.access import Scope, needs
from service.api.paging import next_page
from service.schemas import AuditQuery
from service.state import Service

router = APIRouter(tags=["access"])


@router.get("/audit", dependencies=[needs(Scope.ADMIN)])
def audit(service: Service, query: Annotated[AuditQuery, Query()]) -> Response:
    """What was done, newest first; `links.next` leads to what was done before."""
    entries = service.store.audit.entries(
        action=query.action, actor=query.actor, after=query.after, limit=query.limit
    )
    following = next_page("/audit", query, entries, lambda last: last.id)
    listed = [
        {**msgspec.to_builtins(entry), "at": documents.timestamp(entry.at)} for entry in entries
    ]
    return documents.json_response(documents.page("entries", listed, following))
