"""Bodies of requests: read for those who may come in, up to a length, and to a share of memory.

Requests with a body change something, so they may not come from a page of another site.

Who brings no key, or a wrong one, is refused before the body is read. What is refused here closes
the connection, because the rest of the body is not going to be read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ProblemError
from service.http.access import LOGIN, LOGOUT, whose
from service.http.access import Scope as KeyScope
from service.http.connections import client_name
from service.http.middleware import SAFE, put_back
from service.http.state import State
from service.http.wellformed import BATCH

SMALL_BYTES = 64 * 1024
"""Of any body but a batch of lookups; an order has a few hundred."""

_FORM_BYTES = 16 * 1024
"""Of a body that may come without a key: the login form, with the key itself."""

_SHARE_BYTES = 16 * 2**20
"""Of one client's bodies in memory, and room for the largest in any case."""

_SHARES = 4
"""Batches of all clients together may hold so many shares. Small bodies are always read."""

_FORMS = frozenset({LOGIN, LOGOUT})


class LimitBody:
    """Refuses bodies larger than `limit` bytes, and those of strangers, before they are parsed."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self._share = max(limit, _SHARE_BYTES)
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE:
            await self.app(scope, receive, send)
            return
        body = bytearray()
        client = ""
        try:
            try:
                _check_origin(scope)
                client = await _client(scope)
                is_there = await self._read(scope, receive, body, client)
            except ProblemError as refusal:
                closing = replace(refusal, headers={**refusal.headers, "Connection": "close"})
                await closing.response(scope["path"])(scope, receive, send)
                return
            if is_there:
                whole = {"type": "http.request", "body": bytes(body), "more_body": False}
                await self.app(scope, put_back(whole, receive), send)
        finally:
            self._held[client] -= len(body)
            if not self._held[client]:
                del self._held[client]

    async def _read(self, scope: Scope, receive: Receive, body: bytearray, client: str) -> bool:
        """Read the body whole; whether its client is still there."""
        is_batch = scope["path"] == BATCH
        limit = self.limit if is_batch else min(self.limit, SMALL_BYTES)
        if scope["path"] in _FORMS:
            limit = min(limit, _FORM_BYTES)
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
            if self._held[client] + len(piece) > self._share:
                raise _too_many(429, "this client")
            if is_batch and self._held.total() + len(piece) > _SHARES * self._share:
                raise _too_many(503, "all clients")
            body += piece
            self._held[client] += len(piece)
            more = message.get("more_body", False)
        return True


def _check_origin(scope: Scope) -> None:
    """Refuse what another site's page makes a browser send here, with the browser's cookie.

    Browsers say where a request comes from, by `Sec-Fetch-Site` or at least by `Origin`; what says
    neither is no browser's. Reading is harmless: the other page is not shown the answer.
    """
    headers = dict(scope["headers"])
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        foreign = site not in (b"same-origin", b"none")
    else:  # the scheme is not compared: a proxy may speak https for us
        foreign = origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
    if foreign:
        raise ProblemError(
            status=403,
            kind="cross-site",
            title="Cross-site request",
            detail="Requests from pages of other sites cannot change anything. Use the service's "
            "own pages, or a program, which sends neither Origin nor Sec-Fetch-Site.",
        )


async def _client(scope: Scope) -> str:
    """Whose body it is.

    Raises:
        ProblemError: a stranger's, who may send the forms only.
    """
    if scope["path"] in _FORMS:
        return client_name(scope)
    service: State = scope["app"].state.service
    # Whatever it may do, it may read.
    return whose(await service.access.welcome(scope, KeyScope.READ), scope)


def _too_large(limit: int) -> ProblemError:
    return ProblemError(
        status=413,
        kind="body-too-large",
        title="Body too large",
        detail=f"A body can have at most {limit} bytes here; send fewer problems per call.",
    )


def _too_many(status: int, senders: str) -> ProblemError:
    return ProblemError(
        status=status,
        kind="too-many-bodies",
        title="Too many bodies",
        detail=f"The bodies of {senders} together exceed the memory limit. Try again.",
        headers={"Retry-After": "1"},
    )
