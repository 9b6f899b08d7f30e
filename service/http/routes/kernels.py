"""`/kernels/{name}`, `/packs`, `/signing-key`: kernels, the packs that hold them, who signed these.

The listing goes by hash, so that a cursor means the same place when its pack has been evicted.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from starlette.responses import FileResponse, Response

from service import documents
from service.errors import ProblemError, invalid_field, not_found
from service.http.access import Scope, needs
from service.http.requests import PacksQuery
from service.http.routes.paging import next_page
from service.http.state import Service

router = APIRouter(tags=["kernels"])

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
PackHash = Annotated[str, Path(json_schema_extra={"pattern": f"^{_HASH.pattern}$"})]
_RANGE = re.compile(r"bytes=(?:([0-9]{1,15})-([0-9]{0,15})|-([0-9]{1,15}))", re.ASCII)
_IMMUTABLE = "public, max-age=31536000, immutable"


@router.get("/kernels/{name}", dependencies=[needs(Scope.READ)])
def kernel(service: Service, name: str) -> Response:
    """A kernel's description, and the pack that holds it if one is served here."""
    recorded = service.store.kernel(name)
    if recorded is None:
        raise not_found("Kernel", f"No kernel is recorded under the name {name!r:.300}.")
    pack = service.store.pack_for(name)
    if pack is not None and not service.artifacts.believes(pack):
        pack = None
    links = {"pack": {"href": f"/packs/{pack}"}} if pack else {}
    return documents.json_response({**msgspec.to_builtins(recorded), "pack": pack, "links": links})


@router.get("/packs", dependencies=[needs(Scope.READ)])
def packs(service: Service, query: Annotated[PacksQuery, Query()]) -> Response:
    """The kernel packs that are served and their contents, by hash; `after` continues a page.

    Packs without a trusted signature are not served.
    """
    manifests = service.artifacts.manifests(
        toolchain=query.toolchain, after=query.after or "", limit=query.limit, believed=True
    )
    following = next_page("/packs", query, manifests, lambda last: last[0])
    listed = [documents.pack(pack_hash, manifest) for pack_hash, manifest in manifests]
    return documents.page("packs", listed, following)


@router.get("/packs/{pack_hash}", response_class=FileResponse, dependencies=[needs(Scope.READ)])
def pack(
    request: Request,
    service: Service,
    pack_hash: PackHash,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The bytes of a kernel pack: a shared object, which never changes under this hash.

    A single `Range` is supported; a request with several ranges gets all bytes.
    """
    # Nothing but a hash ever becomes part of a path.
    if not _HASH.fullmatch(pack_hash):
        raise invalid_field(
            "hash", f"is not a pack's hash: {pack_hash!r:.80}", "64 hexadecimal digits"
        )
    tag = f'"{pack_hash}"'
    headers = {"Cache-Control": _IMMUTABLE, "ETag": tag}
    known = if_none_match is not None and (tag in if_none_match or if_none_match == "*")
    part = _range(request)
    # All bytes are checked before all are sent, on a disk that may spoil them. Who has them, or
    # asks for a part, checks the hash of the whole.
    served = None
    if service.artifacts.believes(pack_hash):
        served = service.artifacts.get(pack_hash, afresh=not known and part is None)
    if served is None:
        raise not_found(
            "Pack",
            f"No pack {pack_hash} is served here: it is missing or damaged, or has no trusted "
            "signature. Tune the problem to compile one.",
        )
    if known:
        return Response(status_code=304, headers=headers)
    if part is not None:
        _check_range(part, served.path.stat().st_size, "if-range" in request.headers)
    return FileResponse(
        served.path,
        media_type="application/octet-stream",
        filename=f"{pack_hash}.so",
        headers=headers,
    )


@router.get("/signing-key")
async def signing_key(service: Service) -> Response:
    """The public key that snapshots are signed with, as a line of a file, and its identifier.

    `python -m gemmsmith trust URL` adds it to a user's trusted keys. It takes no API key: who does
    not trust the service yet has no reason to send it one.
    """
    key = service.signer.public
    return documents.json_response({"id": key.id, "key": key.line})


def _range(request: Request) -> re.Match[str] | None:
    """The one range of the request. Any other Range header is removed: all bytes answer it."""
    header = request.headers.get("range")
    part = None if header is None else _RANGE.fullmatch(header)
    if header is not None and (part is None or (part[2] and int(part[2]) < int(part[1]))):
        request.scope["headers"] = [pair for pair in request.headers.raw if pair[0] != b"range"]
        return None
    return part


def _check_range(part: re.Match[str], size: int, conditional: bool) -> None:
    empty = int(part[3]) == 0 if part[3] else int(part[1]) >= size
    if empty and not conditional:
        raise ProblemError(
            status=416,
            kind="range-not-satisfiable",
            detail=f"The pack has {size} bytes.",
            headers={"Content-Range": f"bytes */{size}"},
        )
