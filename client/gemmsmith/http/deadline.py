"""How long an attempt may take in all, however slowly its bytes come.

httpx bounds each wait for data, and a service that sends a byte a second is never late for one.
Here the whole attempt has a deadline, from connecting to the last byte. A long body moves it: each
MiB that arrives is worth a second, so what ends an attempt is a service that is slower than that.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore

PACE = 2**20
"""Bytes per second that an answer comes with at least, once it takes longer than the time-out: a
snapshot of 200,000 winners has 150 MB, and 15 MB compressed."""

LATE = "the answer was not complete in time"


class Deadline:
    """The moment at which an attempt has failed, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._at - time.monotonic()

    def arrived(self, count: int) -> None:
        """Move it by the time that this many bytes may take."""
        self._at += count / PACE


class Clock(threading.local):
    """The deadline of what this thread is waiting for, if there is one."""

    _deadline: Deadline | None = None

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Inside the block, no wait of this thread outlasts the deadline."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None

    def at_most(self, timeout: float | None) -> float | None:
        """The time-out, or less if the deadline comes first.

        Raises:
            httpcore.ReadTimeout: the deadline has passed.
        """
        if self._deadline is None:
            return timeout
        left = self._deadline.left()
        if left <= 0:
            raise httpcore.ReadTimeout(LATE)
        return left if timeout is None else min(timeout, left)


class TimedBackend(httpcore.SyncBackend):
    """Opens the connections of a synchronous client, whose every wait ends by the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self._clock.at_most(timeout)
        stream = super().connect_tcp(host, port, timeout, local_address, socket_options)
        return _TimedStream(stream, self._clock)


class _TimedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._clock.at_most(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._clock.at_most(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self._clock.at_most(timeout)
        return _TimedStream(
            self._stream.start_tls(ssl_context, server_hostname, timeout), self._clock
        )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
