"""`GET /snapshot`: all current winners of a device model, to choose from without asking again."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from service.errors import not_found
from service.http.access import Caller, whose
from service.http.lookup_routes import LookupRoute
from service.http.questions import QuestionReader, SnapshotQuery
from service.http.routes.exports import weights
from service.http.state import State
from service.lookup.abilities import abilities_of
from service.lookup.cache import VARY
from service.lookup.snapshots import WrittenSnapshot

_QUERY = QuestionReader(SnapshotQuery)
_WORTH_COMPRESSING = 1400
"""Bytes: less is one packet anyway."""


async def snapshot(request: Request, caller: Caller) -> Response:
    """All current winners of a GPU model in one document, with their revision.

    The same winners and packs give the same revision, and with the same signing key the same ETag.
    Packs without a trusted signature are left out.
    """
    service: State = request.app.state.service
    client = whose(caller, request.scope)
    query = _QUERY.query(request.scope["query_string"])
    abilities = abilities_of(request.scope["headers"])
    current = await service.newest_snapshot((client, query.arch, query.device, abilities))
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
    if_none_match = request.headers.get("if-none-match", "")
    if any(f'"{tag}"' in if_none_match for tag in (current.tag, current.revision)):
        return Response(status_code=304, headers=headers)
    codings = weights(request.headers.get("accept-encoding", ""))
    takes_gzip = codings.get("gzip", codings.get("*", 0.0)) > 0
    if current.length < _WORTH_COMPRESSING or not takes_gzip:
        headers["Content-Length"] = str(current.length)
        return StreamingResponse(_sent(current), media_type="application/json", headers=headers)
    headers["Content-Encoding"] = "gzip"
    compressed = await service.lookups.snapshots.run(client, current.compressed)
    return Response(compressed, media_type="application/json", headers=headers)


async def _sent(snapshot: WrittenSnapshot) -> AsyncIterator[bytes]:
    """In pieces; from a thread each would take longer to hand over than to make."""
    for piece in snapshot.pieces():
        yield piece


routes = [LookupRoute("GET", "/snapshot", snapshot, SnapshotQuery)]
