"""`GET /snapshot`: all current winners of a device model, to choose from without asking again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from service.http.abilities import Asking
from service.http.access import Caller, Scope, needs
from service.http.errors import not_found
from service.http.requests import SnapshotQuery
from service.http.state import Service
from service.http.turns import whose
from service.lookup.cache import VARY
from service.lookup.snapshots import WrittenSnapshot

router = APIRouter(tags=["lookup"])

_WORTH_COMPRESSING = 1400
"""Bytes: less is one packet anyway."""


@router.get("/snapshot")
async def snapshot(
    request: Request,
    service: Service,
    caller: Annotated[Caller, needs(Scope.READ)],
    asking: Asking,
    query: Annotated[SnapshotQuery, Query()],
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """All current winners of a GPU model in one document, with their revision.

    The same winners and packs give the same revision, and with the same signing key the same ETag.
    Packs without a trusted signature are left out.
    """
    client = whose(caller, request.scope)
    current = await service.snapshots.newest(client, query.arch, query.device, asking)
    if current is None:
        raise not_found(
            "Snapshot",
            "No device model has a winner yet. Request a tuning job: POST /tune.",
            {"tune": {"href": "/tune", "method": "POST"}, "devices": {"href": "/devices"}},
        )
    headers = {
        "ETag": f'"{current.tag}"',
        "Cache-Control": "no-cache",
        "Vary": f"{VARY}, Accept-Encoding",
    }
    # Quoted, a hash is inside a list of tags, weak ones too, only as one of them. Clients that
    # check no signatures name the revision alone.
    if any(f'"{tag}"' in (if_none_match or "") for tag in (current.tag, current.revision)):
        return Response(status_code=304, headers=headers)
    if current.length < _WORTH_COMPRESSING or not _takes_gzip(accept_encoding):
        headers["Content-Length"] = str(current.length)
        return StreamingResponse(_sent(current), media_type="application/json", headers=headers)
    headers["Content-Encoding"] = "gzip"
    compressed = await service.snapshots.compressed(client, current)
    return Response(compressed, media_type="application/json", headers=headers)


async def _sent(snapshot: WrittenSnapshot) -> AsyncIterator[bytes]:
    """In pieces; from a thread each would take longer to hand over than to make."""
    for piece in snapshot.pieces():
        yield piece


def _takes_gzip(accept_encoding: str) -> bool:
    for coding in accept_encoding.split(","):
        name, _, weight = coding.partition(";")
        if name.strip().lower() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
