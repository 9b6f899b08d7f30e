"""`/kernels/{name}`, `/packs` and `/packs/{hash}`: kernels, and the compiled bytes that hold them.

The listing goes by hash, so that a cursor means the same place when its pack has been evicted.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.responses import FileResponse, Response

from service.http import documents
from service.http.access import Scope, needs
from service.http.errors import invalid_field, not_found
from service.http.requests import PacksQuery
from service.http.routes.paging import next_page
from service.http.state import Service

router = APIRouter(tags=["kernels"])

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
PackHash = Annotated[str, Path(json_schema_extra={"pattern": f"^{_HASH.pattern}$"})]
_IMMUTABLE = "public, max-age=31536000, immutable"


@router.get("/kernels/{name}", dependencies=[needs(Scope.READ)])
def kernel(service: Service, name: str) -> Response:
    """A kernel's description, and the pack that holds it if it has been compiled here."""
    found = service.store.kernel(name)
    if found is None:
        raise not_found("Kernel", f"No kernel is recorded under the name {name!r:.300}.")
    pack = service.store.pack_for(name)
    links = {"pack": {"href": f"/packs/{pack}"}} if pack else {}
    return documents.json_response({**msgspec.to_builtins(found), "pack": pack, "links": links})


@router.get("/packs", dependencies=[needs(Scope.READ)])
def packs(service: Service, query: Annotated[PacksQuery, Query()]) -> Response:
    """The kernel packs that are here and what they hold, by hash; `after` continues a page."""
    found = service.artifacts.manifests(
        toolchain=query.toolchain, after=query.after or "", limit=query.limit
    )
    following = next_page("/packs", query, found, lambda last: last[0])
    listed = [documents.pack(pack_hash, manifest) for pack_hash, manifest in found]
    return documents.json_response(documents.page("packs", listed, following))


@router.get("/packs/{pack_hash}", response_class=FileResponse, dependencies=[needs(Scope.READ)])
def pack(service: Service, pack_hash: PackHash) -> Response:
    """A kernel pack's bytes: a shared object, the same for ever under this hash."""
    # Nothing but a hash ever becomes part of a path.
    if not _HASH.fullmatch(pack_hash):
        raise invalid_field(
            "hash", f"is not a pack's hash: {pack_hash!r:.80}", "64 hexadecimal digits"
        )
    found = service.artifacts.get(pack_hash, afresh=True)
    if found is None:
        raise not_found("Pack", f"No pack {pack_hash} is here; tune the problem to compile one.")
    return FileResponse(
        found.path,
        media_type="application/octet-stream",
        filename=f"{pack_hash}.so",
        headers={"Cache-Control": _IMMUTABLE, "ETag": f'"{pack_hash}"'},
    )
