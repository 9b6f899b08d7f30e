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

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.errors import ProblemError
from service.metrics.prometheus import Metrics

UNLOGGED = "gemmsmith.unlogged"
"""Set in the ASGI scope of what is answered without work: one of thousands a second, which
/metrics counts. It has a line in the log all the same if the caller gave it an id to find it by."""

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
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = _given_id(scope)
        request = given or f"{_PROCESS}{next(_requests):08x}"
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request=request)
        status, streamed = 0, False
        began = time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status, streamed
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request.encode()),
                ]
                streamed = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
            await send(message)

        try:
            await self.app(scope, receive, observed)
        except Exception:
            log.exception("internal error", method=scope["method"], path=scope["path"])
            if status:
                raise  # too late to answer otherwise; the server closes the connection
            await _fault(request).response(scope["path"])(scope, receive, observed)
        finally:
            seconds = time.perf_counter() - began
            _count(scope, status, None if streamed else seconds)
            if given or UNLOGGED not in scope:
                log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    ms=round(seconds * 1e3, 2),
                )


class RefuseCrossSite:
    """Refuses what another site's page makes a browser send here, with the browser's cookie.

    Browsers say where a request comes from, by `Sec-Fetch-Site` or at least by `Origin`; what says
    neither is no browser's. Reading is harmless: the other page is not shown the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] in SAFE or not _is_foreign(scope):
            await self.app(scope, receive, send)
            return
        problem = ProblemError(
            status=403,
            kind="cross-site",
            title="Cross-site request",
            detail="Requests from pages of other sites cannot change anything. Use the service's "
            "own pages, or a program, which sends neither Origin nor Sec-Fetch-Site.",
            headers={"Connection": "close"},  # the body is not going to be read
        )
        await problem.response(scope["path"])(scope, receive, send)


def _is_foreign(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    # The scheme is not compared: a proxy may speak https for us.
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def _fault(request: str) -> ProblemError:
    return ProblemError(
        status=500,
        kind="internal-error",
        title="Internal error",
        detail=f"An internal error; the service's log has the cause under request {request}.",
    )


def _given_id(scope: Scope) -> str | None:
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else None


def _count(scope: Scope, status: int, seconds: float | None) -> None:
    service = getattr(scope["app"].state, "service", None) if "app" in scope else None
    if service is None:
        return
    metrics: Metrics = service.metrics
    # The route's template, not the path: paths are unbounded, label values must not be.
    route = getattr(scope.get("route"), "path", "unmatched")
    metrics.request(scope["method"], route, status, seconds)
    service.denials.note_answer(scope, status)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        service.readiness.doubt()


def put_back(message: Message, receive: Receive) -> Receive:
    """`receive` with the message that was taken from it put back."""
    taken = [message]

    async def again() -> Message:
        return taken.pop() if taken else await receive()

    return again
