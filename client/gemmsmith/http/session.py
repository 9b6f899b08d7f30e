"""What the calls of one client share."""

from __future__ import annotations

import logging
import time

from gemmsmith.errors import ServiceUnavailable
from gemmsmith.http.replies import NoAnswer, Response
from gemmsmith.http.requests import Request
from gemmsmith.http.retry import RetryPolicy
from gemmsmith.http.sending import Sender
from gemmsmith.http.transport import Setup

AWAY_S = 10.0
"""After a failed lookup, cached answers are served without a request for this long. Otherwise a
training program with a hundred layers waits for a hundred time-outs at its start."""

WHOLE_S = 60.0
"""After this long no further attempt begins: programs wait for winners when they start."""

log = logging.getLogger("gemmsmith")


class Session:
    """What the calls of one client share.

    Attributes:
        last_from_cache: the last lookup was answered from the cache because the service was away.
        away_until: time on `time.monotonic()`'s clock until which cached answers are served.
    """

    def __init__(self, setup: Setup, sender: Sender) -> None:
        self.setup = setup
        self.sender = sender
        self.retry = RetryPolicy(retries=setup.retries)
        self.last_from_cache = False
        self.away_until = 0.0
        self._warned = False

    async def exchange(self, request: Request, retry: RetryPolicy | None = None) -> Response:
        """Send, and repeat as `retry` says, by default the session's own.

        Raises:
            ServiceUnavailable: no response at all, however often it was tried.
        """
        attempt = 0
        until = time.monotonic() + WHOLE_S
        while True:
            reply = await self.sender.send(request)
            delay = (retry or self.retry).delay(attempt, reply)
            if delay is None or time.monotonic() + delay > until:
                break
            attempt += 1
            await self.sender.sleep(delay)
        if isinstance(reply, NoAnswer):
            raise ServiceUnavailable(
                f"no answer from {self.setup.url}: {reply.reason} ({attempt + 1} attempts). "
                "Is the service running (`gemmsmith serve`) and is the URL right?"
            )
        return reply

    def answered(self) -> None:
        """Note that the service is reachable."""
        self.last_from_cache = False
        self.away_until = 0.0
        self._warned = False

    def away(self, reason: Exception) -> None:
        """Note that a cached answer is served because a request failed; warn once in an outage."""
        self.last_from_cache = True
        self.away_until = time.monotonic() + AWAY_S
        if not self._warned:
            self._warned = True
            log.warning("serving cached answers: %s", reason)
