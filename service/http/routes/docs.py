"""`/`: links; `/openapi.json`: the description that `/docs` is made of."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from service import documents
from service.http.access import Scope, needs
from service.pages.addresses import OVERVIEW

router = APIRouter(include_in_schema=False)


@router.get("/", dependencies=[needs(Scope.READ)])
async def index(request: Request) -> Response:
    """Where to go from here: a browser to the pages."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(OVERVIEW, headers={"Vary": "Accept"})
    places = (
        "best", "winners", "jobs", "results", "packs", "devices", "healthz", "readyz", "metrics",
        "docs",
    )  # fmt: skip
    links = {name: {"href": f"/{name}"} for name in places}
    content = {"service": "gemmsmith", "links": links}
    return documents.json_response(content, headers={"Vary": "Accept"})


@router.get("/openapi.json", dependencies=[needs(Scope.READ)])
def openapi(request: Request) -> Response:
    """The OpenAPI description."""
    return documents.json_response(request.app.openapi())
