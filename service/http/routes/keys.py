"""`/keys`: API keys, made, listed and revoked; `/audit`: who changed what, or who may come in.

A key itself is shown once, where it is made.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from service import documents
from service.errors import ProblemError, not_found
from service.http.access import Caller, Scope, needs
from service.http.requests import AuditQuery, KeyBody, KeysQuery
from service.http.routes.paging import next_page
from service.http.state import Service
from tuner.errors import KeyNameTaken, KeyNotFound
from tuner.store.keys import ApiKey

router = APIRouter(tags=["access"])


@router.get("/keys", dependencies=[needs(Scope.ADMIN)])
def list_keys(service: Service, query: Annotated[KeysQuery, Query()]) -> Response:
    """Active keys, newest first; with `inactive` also revoked and expired ones."""
    keys = service.store.keys.list(inactive=query.inactive, after=query.after, limit=query.limit)
    following = next_page("/keys", query, keys, lambda last: last.id)
    return documents.page("keys", map(_document, keys), following)


@router.post("/keys", status_code=201)
def create_key(
    service: Service, caller: Annotated[Caller, needs(Scope.ADMIN)], body: KeyBody
) -> Response:
    """Create a key. Only this answer contains its `key`; the service stores a hash."""
    try:
        key, secret = service.store.keys.create(
            body.name,
            body.scope,
            expires_in_s=body.expires_in_s,
            job_limit=body.job_limit,
            actor=caller.name,
        )
    except KeyNameTaken as error:
        raise ProblemError(
            status=409, kind="key-name-taken", title="Name taken", detail=f"{error}."
        ) from error
    service.access.reload()
    return documents.json_response(
        {"key": secret, **_document(key)}, status=201, headers={"Cache-Control": "no-store"}
    )


@router.delete("/keys/{name}")
def revoke_key(
    service: Service, caller: Annotated[Caller, needs(Scope.ADMIN)], name: str
) -> Response:
    """Revoke a key. Its name is not used again. Jobs that it requested go on."""
    try:
        key = service.store.keys.revoke(name, actor=caller.name)
    except KeyNotFound:
        raise not_found(
            "Key", f"There is no active key {name!r:.210}.", {"keys": {"href": "/keys"}}
        ) from None
    service.access.reload()
    return documents.json_response(_document(key))


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


def _document(key: ApiKey) -> dict[str, Any]:
    times = {
        name: documents.timestamp(getattr(key, name))
        for name in ("created_at", "expires_at", "last_used_at", "revoked_at")
    }
    links = {} if key.revoked_at else {"revoke": {"href": f"/keys/{key.name}", "method": "DELETE"}}
    return {**msgspec.to_builtins(key), **times, "links": links}
