"""Repeats of requests: exponential back-off with full jitter.

`Retry-After` is honoured up to `longest`. If a service asks for a longer wait, `Busy` is raised at
once, so that the caller decides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from gemmsmith.errors import Busy
from gemmsmith.http.replies import Reply, Response, retry_after

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses of a temporary failure. Any other status is final."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often a request is repeated, and after which waits.

    Attributes:
        retries: attempts after the first.
        base: upper bound of the first wait in seconds; doubles with every attempt.
        cap: upper bound in seconds of waits that the service did not ask for.
        longest: longest accepted `Retry-After` in seconds.
        statuses: statuses that are tried again.
    """

    retries: int = 3
    base: float = 0.25
    cap: float = 8.0
    longest: float = 30.0
    statuses: frozenset[int] = RETRIED

    def delay(self, attempt: int, reply: Reply) -> float | None:
        """Seconds to wait before the next attempt. Returns None if the reply is final.

        `attempt` counts from 0.
        """
        requested: float | None = None
        if isinstance(reply, Response):
            if reply.status not in self.statuses:
                return None
            requested = retry_after(reply.headers)
        if attempt >= self.retries or (requested is not None and requested > self.longest):
            return None
        # Full jitter (each wait is uniform below the bound) spreads the requests of many ranks
        # that lost the service at the same moment.
        jittered = random.uniform(0, min(self.cap, self.base * 2**attempt))  # noqa: S311
        return jittered if requested is None else requested + jittered


class Patience:
    """How long a request for a job waits for room in the service's queue.

    Args:
        timeout: seconds in all; None for no limit, 0 to rely on the retry policy instead.
        on_busy: called before each wait with the error, whose `retry_after` is the wait.
    """

    def __init__(
        self, timeout: float | None, on_busy: Callable[[Busy], None] = lambda _: None
    ) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._on_busy = on_busy

    def left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, busy: Busy) -> float:
        """Seconds to wait before the rejected request is sent again.

        Raises:
            Busy: the error itself, if the wait would exceed the time-out.
        """
        left = self.left()
        if left is not None and busy.retry_after >= left:
            raise busy
        self._on_busy(busy)
        # Jitter spreads requests that were rejected at the same moment.
        later = busy.retry_after * random.uniform(1.0, 1.25)  # noqa: S311
        return later if left is None else min(later, left)
