"""Few threads for lookups that memory does not answer: clients take turns, whatever each asks for.

Python runs one thread at a time, so more of them make nothing faster, only whoever waits for the
processor later. Single lookups and batches have threads of their own, and no client has all of
them: who asks for little waits for little. Requests of one client are worked on in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread

from service.http.access import LOCAL, Caller
from service.http.attempts import client_name
from service.http.errors import ProblemError

_SINGLES = 4
_BATCHES = 2
_SHARE = 2
"""A client has one thread in so many."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def whose(caller: Caller, connection: Mapping[str, Any]) -> str:
    """What a request, an ASGI connection scope, is counted under: the key, or else the address."""
    return client_name(connection) if caller is LOCAL else caller.name


class Turns:
    """Turns of clients: `threads` work in all, and one in `_SHARE` of them for one client."""

    def __init__(self, threads: int) -> None:
        self._threads = CapacityLimiter(threads)
        self._of_client = threads // _SHARE
        self._clients: dict[str, CapacityLimiter] = {}

    async def run(self, client: str, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """What `work` gives, done in a thread when it is its turn."""
        mine = self._clients.setdefault(client, CapacityLimiter(self._of_client))
        try:
            async with mine:  # one client's requests wait here, not where others do
                return await to_thread.run_sync(work, *arguments, limiter=self._threads)
        finally:
            if not mine.borrowed_tokens and not mine.statistics().tasks_waiting:
                self._clients.pop(client, None)


class Lookups:
    """What lookups may cost.

    Args:
        limit: problems that one client's batches may be asking about at once.
    """

    def __init__(self, limit: int) -> None:
        self.singles = Turns(_SINGLES)
        self.batches = Turns(_BATCHES)
        self._limit = limit
        self._asked: Counter[str] = Counter()

    @contextmanager
    def admitted(self, client: str, problems: int) -> Iterator[None]:
        """While entered, that client is asking about so many problems more.

        Raises:
            ProblemError: 429, they would be too many. One batch alone never is.
        """
        if self._asked[client] and self._asked[client] + problems > self._limit:
            raise ProblemError(
                status=429,
                kind="too-many-lookups",
                title="Too many lookups",
                detail=f"Batches under way may have {self._limit} problems together; wait for "
                "the answers before sending more, or fetch GET /snapshot once.",
                headers={"Retry-After": "2"},
            )
        self._asked[client] += problems
        try:
            yield
        finally:
            self._asked[client] -= problems
            if not self._asked[client]:
                del self._asked[client]
