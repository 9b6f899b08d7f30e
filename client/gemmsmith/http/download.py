"""Fetches a file from any web server, piece by piece.

No key is sent, and no redirect is followed: only the user decides which server is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus

import httpx

from gemmsmith.core.bounds import BOUNDS
from gemmsmith.errors import ServiceError, ServiceUnavailable
from gemmsmith.http.deadline import LATE
from gemmsmith.http.replies import NoAnswer, Reply
from gemmsmith.http.requests import get
from gemmsmith.http.sending import Sender
from gemmsmith.http.transport import DEFAULT_TIMEOUT_S, Setup
from gemmsmith.showing import address

PACE = 2**15
"""Slowest rate, in bytes per second, at which a file may come."""


def download(url: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> Iterator[bytes]:
    """The pieces of the file, as they arrive; each may take `timeout` seconds.

    Raises:
        ValueError: not a URL.
        ServiceError: the server has no such file, or redirects.
        ServiceUnavailable: the server cannot be reached, is too slow, or stops in the middle.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{address(url)} is not a URL: {error}") from None
    server = str(parsed.copy_with(raw_path=b"/", fragment=None))
    path, params = parsed.raw_path.partition(b"?")[0].decode(), parsed.params.multi_items()
    request = replace(get(path), params=tuple(params))
    request = request.with_header("accept-encoding", "identity")
    sender = Sender(Setup(server, False, timeout, 0, None, BOUNDS))
    end = time.monotonic() + timeout
    with sender.http:
        for piece in sender.iterate(sender.stream(request)):
            if not isinstance(piece, bytes):
                raise _failed(address(url), piece)
            yield piece
            end += len(piece) / PACE
            if time.monotonic() > end:
                raise ServiceUnavailable(f"{address(url)} cannot be fetched: {LATE}")


def _failed(url: str, reply: Reply) -> Exception:
    if isinstance(reply, NoAnswer):
        return ServiceUnavailable(f"{url} cannot be fetched: {reply.reason}")
    known = {int(code) for code in HTTPStatus}
    title = HTTPStatus(reply.status).phrase if reply.status in known else ""
    detail = f"{url} cannot be fetched" + (f": {reply.reason}" if reply.reason else "")
    if 300 <= reply.status < 400:
        place = address(reply.headers.get("location", "").partition("?")[0])
        detail = (
            f"{url} redirects to {place}, and redirects are not followed: name that URL, or "
            "fetch the file with `curl -L` and name the file"
        )
    return ServiceError(reply.status, title, detail)
