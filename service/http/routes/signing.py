"""`GET /signing-key`: what this installation signs with."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service.http import documents
from service.http.access import Scope, needs
from service.http.state import Service

router = APIRouter(tags=["kernels"])


@router.get("/signing-key", dependencies=[needs(Scope.READ)])
def signing_key(service: Service) -> Response:
    """The public key that snapshots are signed with, as a line of a file, and its identifier.

    `python -m gemmsmith trust URL` adds it to a user's trusted keys.
    """
    key = service.signer.public
    return documents.json_response({"id": key.id, "key": key.line})
