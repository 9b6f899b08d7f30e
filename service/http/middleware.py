"""What happens to every request: an id, one log line, metrics, no bare 500.

Plain ASGI, so that event streams pass through unbuffered. An exception that nothing else turned
into an answer becomes a problem document here, and the log has its traceback.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from http import HTTPStatus

import anyio
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ProblemError
from service.metrics.prometheus import Metrics

UNLOGGED = "gemmsmith.unlogged"
"""Set in the ASGI scope of what is answered without work: one of thousands a second, which
/metrics counts. It has a line in the log all the same if the caller gave it an id to find it by."""

STREAMED = "gemmsmith.streamed"
"""Set in the ASGI scope of an answer without end, whose time says nothing."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose requests have no body, and change nothing."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROCESS = secrets.token_hex(4)
_requests = itertools.count()

log = structlog.get_logger("gemmsmith.service")


class Observe:
    """Outermost: gives the request its id, logs it, counts it, and answers for crashes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        named = _REQUEST_ID.fullmatch(sent) is not None
        request = sent if named else f"{_PROCESS}{next(_requests):08x}"
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request)
        status = 0
        began = time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request.encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception:
            log.exception("internal error", method=scope["method"], path=scope["path"])
            if status:
                raise  # too late to answer otherwise; the server closes the connection
            fault = ProblemError(
                status=500,
                kind="internal-error",
                detail="An internal error; the service's log has the cause under request "
                f"{request}.",
            )
            await fault.response(scope["path"])(scope, receive, observed)
        finally:
            seconds = time.perf_counter() - began
            _count(scope, status, None if STREAMED in scope else seconds)
            if named or UNLOGGED not in scope:
                log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round(seconds * 1e3, 2),
                )


class AnswerHead:
    """Asks for a GET, and ends it when its head is there: an event stream would go on for ever.

    What is inside, the log and the metrics too, sees a GET. The server outside knows of the HEAD
    and keeps the Content-Length.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        with anyio.CancelScope() as asked:

            async def head_only(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await send(message)
                    await send({"type": "http.response.body", "body": b""})
                    asked.cancel()

            await self.app({**scope, "method": "GET"}, receive, head_only)


def _count(scope: Scope, status: int, seconds: float | None) -> None:
    service = getattr(scope["app"].state, "service", None) if "app" in scope else None
    if service is None:
        return
    metrics: Metrics = service.metrics
    # The route's template, not the path: paths are unbounded, label values must not be.
    route = getattr(scope.get("route"), "path", "unmatched")
    metrics.request(scope["method"], route, status, seconds)
    if status in (401, 403):
        service.denials.note_answer(scope, status)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        service.readiness.doubt()


def put_back(message: Message, receive: Receive) -> Receive:
    """`receive` with the message that was taken from it put back."""
    taken = [message]

    async def again() -> Message:
        return taken.pop() if taken else await receive()

    return again
