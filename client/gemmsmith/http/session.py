"""The state that all calls of a client share."""

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
"""Seconds after a failed lookup in which cached answers are served without a request. Otherwise a
training program with a hundred layers would wait for a hundred time-outs at its start."""

WHOLE_S = 60.0
"""Seconds after which no further attempt begins, because programs wait for winners at their
start."""

log = logging.getLogger("gemmsmith")


class Session:
    """The state that all calls of a client share.

    Attributes:
        last_from_cache: the last lookup was answered from the cache because the service could not
            be reached.
        away_until: time of `time.monotonic()` until which cached answers are served.
    """

    def __init__(self, setup: Setup, sender: Sender) -> None:
        self.setup = setup
        self.sender = sender
        self.retry = RetryPolicy(retries=setup.retries)
        self.last_from_cache = False
        self.away_until = 0.0
        self._warned = False

    async def exchange(self, request: Request, retry: RetryPolicy | None = None) -> Response:
        """Send a request, and repeat it by a retry policy, by default that of the session.

        Raises:
            ServiceUnavailable: no attempt got a response.
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
        self.last_from_cache = False
        self.away_until = 0.0
        self._warned = False

    def away(self, reason: Exception) -> None:
        """Called when a cached answer replaces a failed request. Warns once during an outage."""
        self.last_from_cache = True
        self.away_until = time.monotonic() + AWAY_S
        if not self._warned:
            self._warned = True
            log.warning("serving cached answers: %s", reason)
