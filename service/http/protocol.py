"""HTTP as it is spoken on the socket: uvicorn's, with limits, and refusals in the one error shape.

httptools takes a request line and headers without end, and everything before the application sees
the request would be kept in memory. What is too long, or not HTTP at all, is answered here with a
problem document, and the connection is closed.
"""

from __future__ import annotations

from asyncio import Transport
from http import HTTPStatus

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.errors import ProblemError

MAX_URL_BYTES = 8 * 1024
MAX_HEAD_BYTES = 32 * 1024
"""Of the URL and all headers together. A key, a cookie and a traced proxy chain are 2 KB."""

log = structlog.get_logger("gemmsmith.service")


class Protocol(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A client is here."""
        super().connection_made(transport)
        self._in_head = False
        self._received = 0  # of an unfinished head, without its first piece
        self._refusal = _MALFORMED

    def data_received(self, data: bytes) -> None:
        """Parse what came; give up on a head that does not end."""
        in_head = self._in_head
        super().data_received(data)
        if in_head and self._in_head:
            self._received += len(data)
            if self._received > MAX_HEAD_BYTES:
                too_long = len(self.url) > MAX_URL_BYTES
                self._refusal = _URL_TOO_LONG if too_long else _HEAD_TOO_LARGE
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._received = 0

    def on_headers_complete(self) -> None:
        """Its head has ended: refuse it, or start the application."""
        self._in_head = False
        if len(self.url) > MAX_URL_BYTES:
            self._refusal = _URL_TOO_LONG
            raise ValueError("the parser turns this into send_400_response")
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the parser turns this into send_400_response")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what was sent, and close."""
        refusal = self._refusal
        self._in_head = False
        answer = refusal.response("")
        status = HTTPStatus(refusal.status)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        lines += [b"%s: %s" % header for header in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
        log.info("refused", status=refusal.status, said=msg)


_MALFORMED = ProblemError(
    status=400,
    kind="malformed-request",
    title="Malformed request",
    detail="What was sent is not HTTP/1.1.",
)
_URL_TOO_LONG = ProblemError(
    status=414,
    kind="url-too-long",
    title="URL too long",
    detail=f"A URL may have {MAX_URL_BYTES} bytes.",
)
_HEAD_TOO_LARGE = ProblemError(
    status=431,
    kind="headers-too-large",
    title="Headers too large",
    detail=f"The URL and all headers together may have {MAX_HEAD_BYTES} bytes.",
)
