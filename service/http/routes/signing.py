"""`GET /signing-key`: what this installation signs with."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service import documents
from service.http.state import Service

router = APIRouter(tags=["kernels"])


@router.get("/signing-key")
async def signing_key(service: Service) -> Response:
    """The public key that snapshots are signed with, as a line of a file, and its identifier.

    `python -m gemmsmith trust URL` adds it to a user's trusted keys. It takes no API key: who does
    not trust the service yet has no reason to send it one.
    """
    key = service.signer.public
    return documents.json_response({"id": key.id, "key": key.line})
