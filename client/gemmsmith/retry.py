"""When to try again and how long to wait first: exponential back-off with full jitter.

Pure: it decides, the clients wait. `Retry-After` is honoured up to `longest`; a service that asks
for more is reported as `Busy` at once, so that the caller decides.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gemmsmith.wire import NoAnswer, Reply, retry_after

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses that say 'not now'; any other is an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often and how patiently a request is repeated.

    Attributes:
        retries: attempts after the first.
        base: upper bound of the first wait in seconds; doubles with every attempt.
        cap: upper bound of any wait that the service did not ask for.
        longest: longest `Retry-After` that is waited for.
    """

    retries: int = 3
    base: float = 0.25
    cap: float = 8.0
    longest: float = 30.0

    def delay(self, attempt: int, reply: Reply) -> float | None:
        """Seconds to wait before attempt `attempt + 1`, or None: the reply is final.

        `attempt` counts from 0.
        """
        asked: float | None = None
        if not isinstance(reply, NoAnswer):
            if reply.status not in RETRIED:
                return None
            asked = retry_after(reply.headers)
        if attempt >= self.retries or (asked is not None and asked > self.longest):
            return None
        # Full jitter (each wait uniform below the bound) spreads a fleet of ranks that all lost
        # the service at the same moment.
        jittered = random.uniform(0, min(self.cap, self.base * 2**attempt))  # noqa: S311
        return jittered if asked is None else asked + jittered
