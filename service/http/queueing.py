"""Lets few requests at once do what costs: each client has a share of the threads that work.

The framework's own threads are first come, first served: 200 listings of one client made the order
of another wait for 37 s. A write waits in its thread while another process holds the database's
lock, so writes have threads of their own. A request that waits for its turn costs the event loop
nothing, and one whose client has hung up meanwhile is dropped.

An answer that is made whole, such as a page of a list, stays in memory until its client has taken
it. It counts as part of its client's share until then, so it is sent in pieces.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.access import Scope as Right
from service.http.errors import ProblemError
from service.http.middleware import SAFE, put_back
from service.http.protocol import HEALTH
from service.http.state import State
from service.http.turns import Turn, Turns, whose
from service.http.wellformed import BATCH

PATIENCE_S = 30.0
"""Longest wait for a turn; the database's own patience begins when that has come."""

_SOON_S = 0.1
"""A wait after which the client may have hung up."""

_PIECE = 64 * 1024

_TAKES_NO_TURN = frozenset({*HEALTH, "/best"})
"""A lookup answers from memory at once, and takes a turn of its own for anything else."""


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
        service: State = scope["app"].state.service
        try:
            with ExitStack() as held:
                held.enter_context(service.in_progress.admitted(client))
                if scope["path"] == BATCH:
                    message = await receive()  # the whole body: `LimitBody` has read it
                    receive = put_back(message, receive)
                    asked = _problems_in(message.get("body", b""))
                    held.enter_context(service.lookups.problems.admitted(client, asked))
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
