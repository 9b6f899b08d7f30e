"""Lets few requests at once do what costs: each client has a share of the threads that work.

Python runs one thread at a time, so many threads make nothing faster, only those slower that wait
for the processor. So there are few, and clients take turns: lookups, batches, snapshots, other
reads and writes have threads of their own, and no client has all of any kind. Requests of one
client are worked on in order. With the framework's own threads, 200 listings of one client made the
order of another wait for 37 s. A write waits in its thread while another process holds the
database's lock, so writes have threads of their own. A request that waits for its turn costs the
event loop nothing, and one whose client has hung up meanwhile is dropped.

An answer that is made whole, such as a page of a list, stays in memory until its client has taken
it. It counts as part of its client's share until then, so it is sent in pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar, TypeVarTuple

import anyio
from anyio import CapacityLimiter, WouldBlock, to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ProblemError
from service.http.access import Scope as Right
from service.http.access import whose
from service.http.bodies import BATCH
from service.http.middleware import SAFE, put_back
from service.http.protocol import HEALTH

A = TypeVar("A", bound=Hashable)
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

PATIENCE_S = 30.0
"""Longest wait for a turn; the database's own patience begins when that has come."""

_SOON_S = 0.1
"""A wait after which the client may have hung up."""

_PIECE = 64 * 1024

_TAKES_NO_TURN = frozenset({*HEALTH, "/best"})
"""A lookup answers from memory at once, and takes a turn of its own for anything else."""


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
        self.total = self._has.total

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
        detail=f"Batches under way may have {limit} problems together; wait for the answers "
        "before sending more, or fetch GET /snapshot once.",
        headers={"Retry-After": "2"},
    )


def too_many_requests(limit: int) -> ProblemError:
    """The 429 of a client that has so many requests under way."""
    return ProblemError(
        status=429,
        kind="too-many-requests",
        detail=f"{limit} requests of this client are under way; wait for answers before sending "
        "more.",
        headers={"Retry-After": "1"},
    )


class OncePerTurn(Generic[A, T]):
    """A function that is called once for all requests that arrive before the call begins.

    So no result is older than the request. For one event loop.
    """

    def __init__(self, function: Callable[[A], Awaitable[T]]) -> None:
        self._function = function
        self._now: dict[A, asyncio.Task[T]] = {}
        self._next: dict[A, asyncio.Task[T]] = {}

    async def __call__(self, argument: A) -> T:
        """The function's result for `argument`; raises what it raises."""
        turn = self._next.get(argument)
        if turn is None:
            turn = asyncio.create_task(self._turn(argument, self._now.get(argument)))
            turn.add_done_callback(_noticed)
            self._next[argument] = turn
        return await asyncio.shield(turn)

    async def _turn(self, argument: A, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        this = self._now[argument] = self._next.pop(argument)
        try:
            return await self._function(argument)
        finally:
            if self._now.get(argument) is this:
                del self._now[argument]


def _noticed(turn: asyncio.Task[T]) -> None:
    """All requests may have been cancelled meanwhile: then asyncio would log the failure."""
    if not turn.cancelled():
        turn.exception()


class TakeTurns:
    """Innermost, so that bodies are read without a turn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._reads = Turns(8, of_client=2)
        self._writes = Turns(16, of_client=2)
        self._batches = Turns(2, of_client=1)
        self._snapshots = Turns(64, of_client=8)  # they share their work, see `Snapshots`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _TAKES_NO_TURN:
            await self.app(scope, receive, send)
            return
        client = _client(scope)
        if client is None:  # a stranger, refused by the route
            await self.app(scope, receive, send)
            return
        service = scope["app"].state.service
        requests: Shares = service.in_progress
        lookups: Lookups = service.lookups
        try:
            with ExitStack() as held:
                held.enter_context(requests.admitted(client))
                if scope["path"] == BATCH:
                    message = await receive()  # the whole body: `CheckRequest` has read it
                    receive = put_back(message, receive)
                    asked = _problems_in(message.get("body", b""))
                    held.enter_context(lookups.problems.admitted(client, asked))
                began = time.monotonic()
                with anyio.move_on_after(PATIENCE_S) as waiting:
                    turn = await self._turns_of(scope).begin(client)
                if waiting.cancelled_caught:
                    raise _busy()
                held.callback(turn.end)
                if time.monotonic() - began > _SOON_S:
                    receive = await _still_there(receive)
                await self.app(scope, receive, _giving_back(turn, held, send))
        except ProblemError as refusal:
            await refusal.response(scope["path"])(scope, receive, send)
        except _GoneError:
            pass

    def _turns_of(self, scope: Scope) -> Turns:
        if scope["path"] == BATCH:
            return self._batches
        if scope["path"] == "/snapshot":
            return self._snapshots
        return self._reads if scope["method"] in SAFE else self._writes


def _client(scope: Scope) -> str | None:
    try:
        caller = scope["app"].state.service.access.admit(scope, Right.READ)
    except ProblemError:
        return None
    return whose(caller, scope)


def _problems_in(body: bytes) -> int:
    """How many problems a batch asks about, without reading it: each is an object in an object."""
    return max(1, body.count(b"{") - 1)


class _GoneError(Exception):
    """The client has hung up."""


async def _still_there(receive: Receive) -> Receive:
    """`receive` as it was.

    Raises:
        _GoneError: there is no one to answer.
    """
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _GoneError
    with anyio.move_on_after(0) as waiting:
        await receive()
    if not waiting.cancelled_caught:  # nothing else follows a whole request
        raise _GoneError
    return put_back(message, receive)


def _giving_back(turn: Turn, held: ExitStack, send: Send) -> Send:
    """`send`, giving the turn back when the work is done, and all that is held after the answer.

    At once after its end: the client may send its next request before the application returns.
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            turn.thread.close()
            await send(message)
        elif message.get("more_body"):
            turn.share.close()  # such an answer is made as it is sent
            await send(message)
        else:
            body = message.get("body", b"")
            for start in range(0, len(body) - _PIECE, _PIECE):
                piece = body[start : start + _PIECE]
                await send({"type": message["type"], "body": piece, "more_body": True})
            rest = body[max(0, len(body) - 1) // _PIECE * _PIECE :]
            await send({"type": message["type"], "body": rest})
            held.close()

    return sending


def _busy() -> ProblemError:
    return ProblemError(
        status=503,
        kind="store-unavailable",
        title="The database cannot be used",
        detail="Many other requests are waiting; nothing was changed. Try again.",
        headers={"Retry-After": "5"},
    )
