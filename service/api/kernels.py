"""`/kernels/{name}` and `/packs/{hash}`: what a kernel is, and the compiled bytes that hold it."""

from __future__ import annotations

import re

import msgspec
from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from service import documents
from service.problems import invalid_field, not_found
from service.state import Service

router = APIRouter(tags=["kernels"])

_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_IMMUTABLE = "public, max-age=31536000, immutable"


@router.get("/kernels/{name}")
def kernel(service: Service, name: str) -> Response:
    """A kernel's description, and the pack that holds it if it has been compiled here."""
    found = service.store.kernel(name)
    if found is None:
        raise not_found("Kernel", f"No kernel is recorded under the name {name!r:.300}.")
    pack = service.store.pack_for(name)
    links = {"pack": {"href": f"/packs/{pack}"}} if pack else {}
    return documents.json_response({**msgspec.to_builtins(found), "pack": pack, "links": links})


@router.get("/packs/{pack_hash}", response_class=FileResponse)
def pack(service: Service, pack_hash: str) -> Response:
    """A kernel pack's bytes: a shared object, the same for ever under this hash."""
    # Nothing but a hash ever becomes part of a path.
    if not _HASH.fullmatch(pack_hash):
        raise invalid_field(
            "hash", f"is not a pack's hash: {pack_hash!r:.80}", "64 hexadecimal digits"
        )
    found = service.artifacts.get(pack_hash)
    if found is None:
        raise not_found("Pack", f"No pack {pack_hash} is here; tune the problem to compile one.")
    return FileResponse(
        found.path,
        media_type="application/octet-stream",
        filename=f"{pack_hash}.so",
        headers={"Cache-Control": _IMMUTABLE, "ETag": f'"{pack_hash}"'},
    )
