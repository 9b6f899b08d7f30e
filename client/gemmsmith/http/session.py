"""What the calls of one client share, and what a call is: requests out, replies in."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

from gemmsmith.answers.cache import Cache
from gemmsmith.bounds import BOUNDS, Bounds
from gemmsmith.errors import ServiceUnavailable
from gemmsmith.http.replies import NoAnswer, Reply, Response
from gemmsmith.http.requests import Request
from gemmsmith.http.retry import RetryPolicy

T = TypeVar("T")
Flow = Generator[Request, Reply, T]

AWAY_S = 10.0
"""After a lookup gave up, cached answers are served without asking for this long: a training
program that asks for a hundred layers at start must not wait out a hundred time-outs."""

WHOLE_S = 60.0
"""After this long no further attempt begins: programs wait for winners when they start."""

log = logging.getLogger("gemmsmith")


@dataclass(kw_only=True)
class Session:
    """What the calls of one client share.

    Attributes:
        last_from_cache: the last lookup was answered from the cache because the service was away.
        gives_deltas: the service tells what has changed since a snapshot, as far as is known.
    """

    url: str
    retry: RetryPolicy
    cache: Cache
    bounds: Bounds = BOUNDS
    last_from_cache: bool = False
    gives_deltas: bool = False
    away_until: float = 0.0
    _warned: bool = False

    def exchange(self, request: Request, retry: RetryPolicy | None = None) -> Flow[Response]:
        """Send, repeating as the retry policy says: `retry`, or else the session's.

        Raises:
            ServiceUnavailable: no response at all, however often it was tried.
        """
        attempt = 0
        delay = request.delay
        until = time.monotonic() + delay + WHOLE_S
        while True:
            reply = yield replace(request, delay=delay)
            again = (retry or self.retry).delay(attempt, reply)
            if again is None or time.monotonic() + again > until:
                break
            attempt, delay = attempt + 1, again
        if isinstance(reply, NoAnswer):
            raise ServiceUnavailable(
                f"no answer from {self.url}: {reply.reason} ({attempt + 1} attempts). "
                "Is the service running (`gemmsmith serve`) and is the URL right?"
            )
        return reply

    def answered(self) -> None:
        """The service is there."""
        self.last_from_cache = False
        self.away_until = 0.0
        self._warned = False

    def away(self, reason: Exception | None) -> None:
        """The service is not there and a cached answer stands in; warned about once an outage."""
        self.last_from_cache = True
        if reason is not None:
            self.away_until = time.monotonic() + AWAY_S
        if reason is not None and not self._warned:
            self._warned = True
            log.warning("serving cached answers: %s", reason)
