"""Deadlines for whole attempts, however slowly their bytes arrive.

httpx limits each wait for data, so a service that sends a byte per second never exceeds a limit.
Here the whole attempt has a deadline, from connecting to the last byte. Each MiB that arrives
extends the deadline by a second, so only a service that is slower than that fails.
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
"""Slowest rate, in bytes per second, at which an answer may take longer than the time-out. A
snapshot of 200,000 winners has 150 MB, and 15 MB compressed."""

LATE = "the answer was not complete in time"


class Deadline:
    """The end of an attempt, `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._at - time.monotonic()

    def arrived(self, count: int) -> None:
        """Extend the deadline by the time that `count` bytes may take."""
        self._at += count / PACE


class Clock(threading.local):
    """The deadline of this thread's attempt, if it has one."""

    _deadline: Deadline | None = None

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Limit all waits of this thread in the block by the deadline."""
        self._deadline = deadline
        try:
            yield
        finally:
            self._deadline = None

    def at_most(self, timeout: float | None) -> float | None:
        """The time-out, or the time until the deadline if that is shorter.

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
    """Opens connections for a synchronous client. The clock limits all their waits."""

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
