"""`/docs`: the API as one page without scripts or anything loaded from elsewhere; `/`: links."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader
from starlette.responses import HTMLResponse, RedirectResponse, Response

from service import documents
from service.access import Scope, needs
from service.pages.addresses import PROBLEMS

router = APIRouter(include_in_schema=False)

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent.parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


@router.get("/", dependencies=[needs(Scope.READ)])
async def index(request: Request) -> Response:
    """Where to go from here: a browser to the pages."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(PROBLEMS, headers={"Vary": "Accept"})
    places = (
        "best", "winners", "jobs", "results", "packs", "devices", "healthz", "readyz", "metrics",
        "docs",
    )  # fmt: skip
    links = {name: {"href": f"/{name}"} for name in places}
    content = {"service": "gemmsmith", "links": links}
    return documents.json_response(content, headers={"Vary": "Accept"})


@router.get("/openapi.json", dependencies=[needs(Scope.READ)])
async def openapi(request: Request) -> Response:
    """The OpenAPI description."""
    return documents.json_response(request.app.openapi())


@router.get("/docs", dependencies=[needs(Scope.READ)])
async def docs(request: Request) -> Response:
    """The OpenAPI description as a readable page."""
    page = _TEMPLATES.get_template("docs.html").render(api=request.app.openapi())
    return HTMLResponse(
        page, headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    )
