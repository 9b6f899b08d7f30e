"""`/ui/login` and `/ui/logout`: a browser's key, kept in a cookie that no script can read.

The cookie holds the key itself, so revoking the key ends every browser's session with it.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import Response

from service.errors import ProblemError
from service.http.access import COOKIE, LOGIN, LOGOUT, Scope
from service.http.state import Service, State
from service.pages import render
from service.pages.fields import posted

router = APIRouter(include_in_schema=False)

_LOCAL_PATH = re.compile(r"/(?![/\\])[!-~]*")
"""Paths that a login may continue to. `//host` and `/\\host` would lead to another host."""


@router.get(LOGIN)
async def form(service: Service, next: str = "/") -> Response:  # noqa: A002 - as it is in the URL
    """The form for a key; a redirect to `next` if the service requires no keys."""
    if not service.access.required:
        return render.see_other(_onward(next))
    return _page(_onward(next))


@router.post(LOGIN)
async def login(service: Service, request: Request) -> Response:
    """Store the form's key in a cookie and continue to the page that the browser requested."""
    fields = await posted(request)
    onward = _onward(fields.get("next", "/"))
    key = fields.get("key", "").strip()
    if not await _is_valid(service, request, key):
        return _page(onward, "This key is unknown: mistyped, revoked or expired.", status=401)
    response = render.see_other(onward)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, key, httponly=True, samesite="strict", secure=secure)
    return response


@router.post(LOGOUT)
async def logout() -> Response:
    response = render.see_other(LOGIN)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response


async def _is_valid(service: State, request: Request, key: str) -> bool:
    """Whether the key is known; every key has the scope `read`."""
    headers = [(b"authorization", b"Bearer " + key.encode())]
    try:
        await service.access.welcome({**request.scope, "headers": headers}, Scope.READ)
    except ProblemError as error:
        if error.status == 429:
            raise
        return False
    return True


def _onward(path: str) -> str:
    return path if _LOCAL_PATH.fullmatch(path) else "/"


def _page(onward: str, error: str = "", *, status: int = 200) -> Response:
    return render.page("login.html", status=status, next=onward, error=error)
