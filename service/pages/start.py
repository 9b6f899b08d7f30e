"""`/ui`: on to the problems."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from service.http.access import Scope, needs
from service.pages.addresses import PROBLEMS

router = APIRouter(include_in_schema=False, dependencies=[needs(Scope.READ)])


@router.get("/ui")
async def start() -> Response:
    """The first page."""
    return RedirectResponse(PROBLEMS, status_code=307)
