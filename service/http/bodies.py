"""Bodies of requests: read for those who may come in, so long each, so much of all at once.

Who brings no key, or a wrong one, is refused before the body is read. What is refused here closes
the connection, because the rest of the body is not going to be read.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.access import LOGIN, LOGOUT
from service.http.access import Scope as KeyScope
from service.http.errors import ProblemError
from service.http.middleware import SAFE, put_back
from service.http.state import State

IN_ALL_BYTES = 64 * 2**20
"""Of all bodies in memory at once, and room for one of the largest in any case."""

_FORM_BYTES = 16 * 1024
"""Of a body that anybody may send: a key, and where to go with it."""

_FORMS = frozenset({LOGIN, LOGOUT})


class LimitBody:
    """Refuses bodies larger than `limit` bytes, and those of strangers, before they are parsed."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self._in_all = max(limit, IN_ALL_BYTES)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; the body, being small, is read whole."""
        if scope["type"] != "http" or scope["method"] in SAFE:
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                is_there = await self._read(scope, receive, body)
            except ProblemError as refusal:
                closing = replace(refusal, headers={**refusal.headers, "Connection": "close"})
                await closing.response(scope["path"])(scope, receive, send)
                return
            if is_there:
                whole = {"type": "http.request", "body": bytes(body), "more_body": False}
                await self.app(scope, put_back(whole, receive), send)
        finally:
            self._held -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Read the body whole; whether its client is still there."""
        limit = self.limit
        if scope["path"] in _FORMS:
            limit = min(limit, _FORM_BYTES)
        else:
            service: State = scope["app"].state.service
            await service.access.welcome(scope, KeyScope.READ)  # whatever it may do, it may read
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            if self._held + len(piece) > self._in_all:
                raise _too_many()
            body += piece
            self._held += len(piece)
            more = message.get("more_body", False)
        return True


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        status=413,
        kind="body-too-large",
        title="Body too large",
        detail=f"A body can have at most {limit} bytes; send fewer problems per call.",
    )


def _too_many() -> ProblemError:
    return ProblemError(
        status=503,
        kind="too-many-bodies",
        title="Too many bodies",
        detail="The bodies of all clients together exceed the memory limit. Try again.",
        headers={"Retry-After": "1"},
    )
