"""`/docs`: the OpenAPI description as a page that people can read."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.pages.callers import Reader
from service.pages.render import page

router = APIRouter(include_in_schema=False)

PATH = "/docs"


@router.get(PATH)
async def docs(caller: Reader, request: Request) -> Response:
    """Every call: what it takes, and what it answers."""
    return page("docs.html", nav=PATH, caller=caller, api=request.app.openapi())
