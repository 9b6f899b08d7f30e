"""`GET /devices`: the GPU models that questions can be about."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from service import documents
from service.http.access import Scope, needs
from service.http.state import Service

router = APIRouter(tags=["history"])


@router.get("/devices", dependencies=[needs(Scope.READ)])
def devices(service: Service) -> Response:
    """Known device models; the first is the default of lookups without `device`."""
    known = service.catalogue.known(refresh=True)
    local = service.catalogue.local
    return documents.json_response(
        {
            "devices": [
                documents.device(model, default=i == 0, local=model == local)
                for i, model in enumerate(known)
            ]
        }
    )
