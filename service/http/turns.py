"""Shares of what is limited: no client has all of it, whatever it asks for.

Python runs one thread at a time, so many threads make nothing faster, only those slower that wait
for the processor. So there are few, and clients take turns: lookups, batches, snapshots, other
reads and writes have threads of their own, and no client has all of any kind. Who asks for little
waits for little. Requests of one client are worked on in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, WouldBlock, to_thread

from service.http.access import LOCAL, Caller
from service.http.connections import client_name
from service.http.errors import ProblemError

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def whose(caller: Caller, connection: Mapping[str, Any]) -> str:
    """What a request, an ASGI connection scope, is counted under: the key, or else the address."""
    return client_name(connection) if caller is LOCAL else f"key {caller.name}"


@dataclass(eq=False, slots=True)
class Turn:
    """A client's turn: a thread of all, and of the client's share. Closing again does nothing."""

    thread: ExitStack = field(default_factory=ExitStack)
    share: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        self.thread.close()
        self.share.close()


class Turns:
    """Turns of clients: `threads` work in all, and `of_client` of them for one client."""

    def __init__(self, threads: int, of_client: int) -> None:
        self._turns = CapacityLimiter(threads)
        self._threads = CapacityLimiter(threads)
        self._of_client = of_client
        self._clients: dict[str, CapacityLimiter] = {}

    async def begin(self, client: str) -> Turn:
        """Wait for a turn of that client."""
        mine = self._clients.setdefault(client, CapacityLimiter(self._of_client))
        turn = Turn()
        turn.share.callback(self._forget, client, mine)
        try:
            # In this order: one client's requests wait by themselves, not where others do.
            for limiter, held in ((mine, turn.share), (self._turns, turn.thread)):
                try:
                    limiter.acquire_on_behalf_of_nowait(turn)  # or a turn of the event loop is lost
                except WouldBlock:
                    await limiter.acquire_on_behalf_of(turn)
                held.callback(limiter.release_on_behalf_of, turn)
        except BaseException:
            turn.end()
            raise
        return turn

    async def run(self, client: str, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """What `work` gives, done in a thread when it is its turn."""
        turn = await self.begin(client)
        try:
            return await to_thread.run_sync(work, *arguments, limiter=self._threads)
        finally:
            turn.end()

    def _forget(self, client: str, mine: CapacityLimiter) -> None:
        if not mine.borrowed_tokens and not mine.statistics().tasks_waiting:
            self._clients.pop(client, None)


class Shares:
    """Counts what each client has of something at the moment, up to a limit."""

    def __init__(self, limit: int, refusal: Callable[[int], ProblemError]) -> None:
        self._limit = limit
        self._refusal = refusal
        self._has: Counter[str] = Counter()

    @contextmanager
    def admitted(self, client: str, number: int = 1) -> Iterator[None]:
        """While entered, that client has so many more.

        Raises:
            ProblemError: they would be too many. Who has nothing may have any number.
        """
        if self._has[client] and self._has[client] + number > self._limit:
            raise self._refusal(self._limit)
        self._has[client] += number
        try:
            yield
        finally:
            self._has[client] -= number
            if not self._has[client]:
                del self._has[client]


class Lookups:
    """What lookups may cost.

    Args:
        limit: problems that one client's batches may be asking about at once.
    """

    def __init__(self, limit: int) -> None:
        self.singles = Turns(4, of_client=2)
        self.snapshots = Turns(2, of_client=1)
        self.problems = Shares(limit, _too_many_lookups)


def _too_many_lookups(limit: int) -> ProblemError:
    return ProblemError(
        status=429,
        kind="too-many-lookups",
        title="Too many lookups",
        detail=f"Batches under way may have {limit} problems together; wait for the answers "
        "before sending more, or fetch GET /snapshot once.",
        headers={"Retry-After": "2"},
    )


def too_many_requests(limit: int) -> ProblemError:
    """The 429 of a client that has so many requests under way."""
    return ProblemError(
        status=429,
        kind="too-many-requests",
        title="Too many requests",
        detail=f"{limit} requests of this client are under way; wait for answers before sending "
        "more.",
        headers={"Retry-After": "1"},
    )
