"""`GET /snapshot`: all current winners of a device model, to choose from without asking again."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from gemmsmith.packs import key_of
from service.http import documents
from service.http.abilities import Asking
from service.http.access import Scope, needs
from service.http.errors import not_found
from service.http.requests import SnapshotQuery
from service.http.state import Service
from service.lookup.cache import VARY

router = APIRouter(tags=["lookup"])


@router.get("/snapshot", dependencies=[needs(Scope.READ)])
def snapshot(
    service: Service,
    asking: Asking,
    query: Annotated[SnapshotQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """All current winners of a GPU model in one document, and the revision that they make.

    The same winners, packs included, have the same revision, and with that the same ETag.
    """
    device = service.catalogue.resolve(query.arch, query.device)
    if device is None:
        raise not_found(
            "Snapshot",
            "No device model has a winner yet. Order a tuning job: POST /tune.",
            {"tune": {"href": "/tune", "method": "POST"}, "devices": {"href": "/devices"}},
        )
    winners = service.store.winners(device=device.slug)
    found = documents.snapshot(
        device.slug,
        (asking.told(found) for found in winners if asking.knows(found.problem)),
        pack_of=functools.cache(service.store.pack_for),
        key=key_of(),
    )
    tag = f'"{found.revision}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": VARY}
    # Quoted, a hash is inside a list of tags, weak ones too, only as one of them.
    if if_none_match is not None and tag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(found.document, media_type="application/json", headers=headers)
