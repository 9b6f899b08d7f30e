"""Unknown keys: logged with the address that they come from, and only so many from each.

An unknown key is looked for in the database, since it may have been made this moment; so it costs
more than one that is known. A known key is never refused here, whatever its neighbours try.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

import structlog

from service.errors import ProblemError

AT_ONCE = 30
"""Unknown keys that an address may try in a row, and again when it has rested for `AT_ONCE` times
`EACH_S`: a job's processes with a key that has just expired."""

EACH_S = 1.0
"""After those, one in so many seconds."""

_MOST_CLIENTS = 10_000

log = structlog.get_logger("gemmsmith.access")


class Attempts:
    """What each address has tried lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_at: OrderedDict[str, float] = OrderedDict()  # when all tries are paid for
        self._refused: set[str] = set()

    def begin(self, client: str) -> None:
        """Count a try.

        Raises:
            ProblemError: 429, with the time after which another one is possible.
        """
        now = self._clock()
        paid_at = max(now, self._paid_at.get(client, now)) + EACH_S
        over_s = paid_at - now - AT_ONCE * EACH_S
        if over_s > 0:
            if client not in self._refused:
                self._refused.add(client)
                log.warning("many unknown API keys", client=client)
            raise _too_many(math.ceil(over_s))
        self._refused.discard(client)
        self._paid_at[client] = paid_at
        self._paid_at.move_to_end(client)
        if len(self._paid_at) > _MOST_CLIENTS:
            forgotten, _ = self._paid_at.popitem(last=False)
            self._refused.discard(forgotten)

    def succeeded(self, client: str) -> None:
        """It was a key after all: the try does not count."""
        if client in self._paid_at:
            self._paid_at[client] -= EACH_S


def _too_many(wait_s: int) -> ProblemError:
    return ProblemError(
        status=429,
        kind="too-many-unknown-keys",
        detail="Many unknown API keys were sent from this address: mistyped, revoked or expired. "
        "Send a valid key, or wait.",
        headers={"Retry-After": str(wait_s)},
    )
