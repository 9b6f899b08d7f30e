"""HTTP as it is spoken on the socket: uvicorn's, with limits, and refusals in the one error shape.

httptools takes a request line and headers without end, and everything before the application sees
the request would be kept in memory. What is too long, or not HTTP at all, is answered here with a
problem document, and the connection is closed. uvicorn waits for the rest of a request for ever:
here a head, a body, and a client that does not take its answer have their deadlines, and
`service.http.connections` says how many there may be.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import Transport
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.errors import ProblemError
from service.http.access import client_of
from service.http.connections import Connections

MAX_URL_BYTES = 8 * 1024
MAX_HEAD_BYTES = 32 * 1024
"""Of the URL and all headers together. A key, a cookie and a traced proxy chain are 2 KB."""

MAX_HEADERS = 100
"""Header fields, those after a body included. Browsers behind a proxy send 30."""

_MAX_PIPELINED = 32
"""Requests that one connection sends before it has the answer to the first."""

_LEAST_PIECE = 16
_FREE_PIECES = 1024
"""Pieces of a body, beyond the free ones, have so many bytes on average. A chunk of one byte costs
as much time as a large one, and 256 KiB arrive at once."""

HEALTH = ("/healthz", "/readyz")

log = structlog.get_logger("gemmsmith.service")


class Protocol(HttpToolsProtocol):
    """One connection.

    Args:
        connections: all of the server's.

    Attributes:
        client_name, deadline: as `service.http.connections.Connection` has them.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.client_name = ""
        self.deadline = math.inf
        self._all = connections
        self._in_head = self._in_body = False
        self._received = 0  # of an unfinished head, without its first piece
        self._pieces = self._of_body = 0  # callbacks and bytes of a body
        self._untaken = 0  # bytes of answers that the client had not taken at the last check
        self._refusal = _MALFORMED
        self._admitted = True

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_name = client_of(self.client[0]) if self.client else ""
        self._admitted = self._all.admit(self, self.loop)
        self.deadline = self.loop.time() + self._all.idle_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came; give up on a head that does not end."""
        in_head, in_body = self._in_head, self._in_body
        super().data_received(data)
        if not (self._in_head or self._in_body):
            return
        if in_head and self._in_head:
            self._received += len(data)
            if self._received > MAX_HEAD_BYTES:
                too_long = len(self.url) > MAX_URL_BYTES
                self._refusal = _URL_TOO_LONG if too_long else _HEAD_TOO_LARGE
                self.send_400_response("")
        elif (in_head, in_body) != (self._in_head, self._in_body) and not self._is_at_work():
            self.deadline = self.loop.time() + self._all.request_s  # for the rest of it

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._received = 0
        self._pieces = self._of_body = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the parser turns this into send_400_response")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        self._of_body += len(body)
        if self._pieces - _FREE_PIECES > self._of_body // _LEAST_PIECE:
            raise ValueError("the parser turns this into send_400_response")
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Its head has ended: refuse it, or start the application."""
        self._in_head = False
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = _URL_TOO_LONG
            raise ValueError("the parser turns this into send_400_response")
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the parser turns this into send_400_response")
        if len(self.pipeline) >= _MAX_PIPELINED:
            # Without a word: it would be taken for the answer to the first.
            self.transport.abort()
            raise ValueError("the parser turns this into send_400_response")
        if not (self._admitted or self.url.partition(b"?")[0].decode("latin-1") in HEALTH):
            self._refusal = _FULL
            raise ValueError("the parser turns this into send_400_response")
        super().on_headers_complete()
        if not self._admitted:
            self.cycle.keep_alive = False
        self._in_body = True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        begin = super()._start_asgi_task

        def request() -> None:
            if not self.transport.is_closing():
                begin(cycle, app)

        self._all.begin(self.client_name, request, self.loop)

    def on_message_complete(self) -> None:
        """Its body has ended, too; the rest is up to the service."""
        super().on_message_complete()
        self._in_body = False
        if not self.cycle.response_complete:
            self.deadline = math.inf
            self._all.works(self)

    def on_response_complete(self) -> None:
        """It is answered: the next one, if it is here already, or waiting for it.

        uvicorn's own sets a timer for each answer, which `deadline` is for here.
        """
        self.server_state.total_requests += 1
        is_closing = self.transport.is_closing()
        if not is_closing:
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
                return
        self._untaken = self.transport.get_write_buffer_size()
        is_slow = is_closing or self._untaken
        self.deadline = self.loop.time() + (self._all.request_s if is_slow else self._all.idle_s)
        self._all.waits(self)

    def pause_writing(self) -> None:
        """The client is slow to take its answer."""
        super().pause_writing()
        self._untaken = self.transport.get_write_buffer_size()
        self.deadline = self.loop.time() + self._all.request_s

    def resume_writing(self) -> None:
        """It has taken a piece of it."""
        super().resume_writing()
        if self._is_at_work():
            self.deadline = math.inf

    def late(self) -> None:
        """Close it, past its deadline; a client that waits for an answer gets a 408."""
        left = self.transport.get_write_buffer_size()
        cycle = self.cycle
        if 0 < left < self._untaken:  # slow, but not stuck
            self._untaken = left
            self.deadline = self.loop.time() + self._all.request_s
        elif left or self.transport.is_closing():
            self.transport.abort()
        elif self._in_head or (cycle and cycle.more_body and not cycle.response_started):
            self._refusal = _TOO_SLOW
            self.send_400_response("")
            self.deadline = self.loop.time() + self._all.request_s
        else:
            self.transport.close()

    def evict(self) -> None:
        self.transport.abort()

    def _is_at_work(self) -> bool:
        """Whether a whole request is here and not answered yet."""
        cycle = self.cycle
        return bool(self.pipeline) or (
            cycle is not None and not (cycle.more_body or cycle.response_complete)
        )

    def send_400_response(self, msg: str) -> None:
        """Refuse what was sent, and close."""
        refusal = self._refusal
        self._in_head = False
        if self.transport.is_closing():
            return
        answer = refusal.response("")
        status = HTTPStatus(refusal.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        lines += [b"%s: %s" % header for header in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
        log.info("refused", status=refusal.status, said=msg, client=self.client_name)


_MALFORMED = ProblemError(
    status=400,
    kind="malformed-request",
    detail="What was sent is not HTTP/1.1.",
)
_URL_TOO_LONG = ProblemError(
    status=414,
    kind="url-too-long",
    title="URL too long",
    detail=f"A URL can have at most {MAX_URL_BYTES} bytes.",
)
_HEAD_TOO_LARGE = ProblemError(
    status=431,
    kind="headers-too-large",
    detail=f"The URL and all headers together can have at most {MAX_HEAD_BYTES} bytes, and the "
    f"headers {MAX_HEADERS} fields.",
)
_TOO_SLOW = ProblemError(
    status=408,
    kind="request-timeout",
    detail="The rest of the request did not arrive in time.",
)
_FULL = ProblemError(
    status=503,
    kind="too-many-connections",
    detail="The limit of connections, or of connections from this address, is reached; close "
    "some, and try again.",
    headers={"Retry-After": "1"},
)
