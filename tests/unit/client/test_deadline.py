"""The time and the memory of a call are limited, whatever a service sends and however slowly."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gemmsmith import Bounds, GemmsmithError, ServiceFault, ServiceUnavailable
from gemmsmith.http.replies import NoAnswer, Reply
from gemmsmith.http.requests import Request, get
from gemmsmith.http.retry import RetryPolicy
from gemmsmith.http.sending import Sender
from gemmsmith.http.session import Session
from gemmsmith.http.transport import Setup
from tests.unit.client.misbehaving import KINDS, ask, raw

TIMEOUT_S = 0.15
PATIENCE_S = 2.5
"""Seconds that a call with this time-out may take on a busy machine. The slow answers of these
tests take far longer."""
TICK_S = 0.02

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
LONG = b"content-length: 100000\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
GZIPPED = b"content-encoding: gzip\r\n" + CHUNKED


def bytewise(data: bytes) -> Iterable[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


def again(piece: bytes) -> Iterable[bytes]:
    return itertools.repeat(piece)


def slowly(begin: bytes, pieces: Iterable[bytes]) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.sendall(begin)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(TICK_S)

    return talk


SLOW = {
    "nothing": lambda: slowly(b"", again(b"")),
    "status line": lambda: slowly(b"", bytewise(b"HTTP/1.1 200 " + b"O" * 500)),
    "header": lambda: slowly(HEAD + b"x: ", again(b"x")),
    "headers": lambda: slowly(HEAD, again(b"x: y\r\n")),
    "informational": lambda: slowly(b"", again(b"HTTP/1.1 103 Early Hints\r\n\r\n")),
    "body": lambda: slowly(HEAD + LONG, again(b" ")),
    "chunks": lambda: slowly(HEAD + CHUNKED, again(b"1\r\n \r\n")),
    "chunk's head": lambda: slowly(HEAD + CHUNKED + b"1;", again(b"x")),
    "until it closes": lambda: slowly(HEAD + b"\r\n", again(b" ")),
    "compressed": lambda: slowly(HEAD + GZIPPED, again(b"1\r\n\x1f\r\n")),
    "error": lambda: slowly(b"HTTP/1.1 500 No\r\n" + LONG, again(b" ")),
    "busy": lambda: slowly(b"HTTP/1.1 503 No\r\nretry-after: 0\r\n" + LONG, again(b" ")),
    "redirect": lambda: slowly(b"HTTP/1.1 307 No\r\nlocation: /elsewhere\r\n" + LONG, again(b" ")),
}

CALLS = {
    "best": ("best", 1, 8, 8),
    "snapshot": ("snapshot", "nvidia-h200-132sm"),
}


@contextlib.contextmanager
def within(seconds: float = PATIENCE_S) -> Iterator[None]:
    """Fails if the block takes longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def fails(kind: type, url: str, *call: Any, retries: int = 0) -> None:
    with pytest.raises(GemmsmithError):
        ask(kind, url, *call, timeout=TIMEOUT_S, retries=retries)


@KINDS
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("slow", SLOW)
def test_slow_answers_are_given_up(slow: str, call: str, kind: type) -> None:
    with raw(SLOW[slow]()) as url, within():
        fails(kind, url, *CALLS[call])


@KINDS
@pytest.mark.parametrize("slow", SLOW)
def test_a_slow_event_stream_yields_by_the_deadline(slow: str, kind: type) -> None:
    with raw(SLOW[slow]()) as url, within(), contextlib.suppress(GemmsmithError):
        named = {"deadline": time.monotonic() + TIMEOUT_S}
        ask(kind, url, "job_events", "j1", named=named, only_first=True, timeout=TIMEOUT_S)


@KINDS
def test_retries_are_within_bounds_as_well(kind: type) -> None:
    with raw(SLOW["busy"]()) as url, within(2 * PATIENCE_S):
        fails(kind, url, "best", 1, 8, 8, retries=2)


class LateSender(Sender):
    """Advances a simulated clock by ten seconds, and gets no answer."""

    now = 0.0

    async def send(self, request: Request) -> Reply:
        self.now += 10.0
        return NoAnswer(reason="late")

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_no_attempt_begins_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup("http://x", False, 1.0, 1000, None, Bounds())
    sender = LateSender(setup)
    session = Session(setup, sender)
    session.retry = RetryPolicy(retries=1000, cap=0.0)
    monkeypatch.setattr("time.monotonic", lambda: sender.now)
    with pytest.raises(ServiceUnavailable, match="7 attempts"):
        sender.run(session.exchange(get("/x")))


@KINDS
def test_a_proxy_is_within_bounds_as_well(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(slowly(b"", bytewise(b"HTTP/1.1 200 " + b"O" * 500))) as proxy, within():
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        with pytest.raises(ServiceUnavailable):
            ask(kind, "https://gemmsmith.test", "best", 1, 8, 8, timeout=TIMEOUT_S)


@KINDS
def test_a_handshake_is_within_bounds_as_well(kind: type) -> None:
    with (
        raw(slowly(b"\x16\x03\x03\x40\x00", again(b"\0"))) as url,
        within(),
        pytest.raises(ServiceUnavailable),
    ):
        ask(kind, url.replace("http", "https"), "best", 1, 8, 8, timeout=TIMEOUT_S)


@KINDS
def test_a_long_answer_has_the_time_that_its_length_takes(kind: type) -> None:
    body = b'{"devices":[]}'.ljust(2**21)

    def talk(connection: socket.socket) -> None:
        connection.sendall(HEAD + f"content-length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 2**18):
            connection.sendall(body[start : start + 2**18])
            time.sleep(0.15)  # 1.2 s in all, at 1.7 MiB/s

    with raw(talk) as url:
        assert ask(kind, url, "devices", timeout=0.6) == []


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@KINDS
@pytest.mark.parametrize(
    ("begin", "piece", "error"),
    [
        (gzip.compress(b'{"devices":[]}'), bytes(2**16), ServiceUnavailable),
        (gzip.compress(b'{"devices":[]}'), gzip.compress(b" "), ServiceUnavailable),
        (gzip.compress(b""), gzip.compress(b""), ServiceUnavailable),
        # Blocks that decompress to nothing, and an endless name.
        (gzip.compress(b"")[:10], b"\0\0\0\xff\xff" * 2**14, ServiceFault),
        (b"\x1f\x8b\x08\x08\0\0\0\0\0\0", b"x" * 2**16, ServiceFault),
    ],
    ids=["bytes", "streams", "empty streams", "empty blocks", "name"],
)
def test_compressed_data_that_is_empty_is_counted(
    kind: type, begin: bytes, piece: bytes, error: type[Exception]
) -> None:
    def talk(connection: socket.socket) -> None:
        connection.sendall(HEAD + GZIPPED + chunk(begin))
        for _ in range(5000):
            connection.sendall(chunk(piece))

    with raw(talk) as url:
        tracemalloc.start()
        try:
            with pytest.raises(error):
                ask(kind, url, "devices", bounds=Bounds(answer_bytes=2**20), timeout=10)
            assert tracemalloc.get_traced_memory()[1] < 2**23
        finally:
            tracemalloc.stop()
