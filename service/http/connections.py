"""Who is connected, and who has to go: so many connections in all, and so many of one address.

A connection waits until a whole request of its client is here, and again from its answer on. Where
there is no room for a new one, the one goes that has waited longest: of the same address if that
has as many as it may, else of all. So idle connections keep no client out. Where all are at
work, a few more are let in that may ask for the service's health only.

A connection that has a deadline and is past it is ended by the `sweep`. Of one address, few
requests begin in one turn of the event loop, so that a flood of them makes others wait for a few at
a time. Nothing here is locked: all of it runs in the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

import structlog

from service.settings import Settings

HEALTH_RESERVE = 16
"""Connections beyond the limit that may ask for the service's health."""

OTHER_FILES = 256
"""Files that the service opens besides connections: 48 to the database (three files each with
SQLite), logs, packs."""

_STREAMS_SHARE = 4
"""One connection in so many may be an event stream: those last for hours."""

_CLIENT_SHARE = 4
"""And one in so many may be of one address, unless the settings say else; or work for one key."""

_BEGIN_AT_ONCE = 16
"""Requests of one address that begin in one turn of the event loop. Those of 200 connections, half
a millisecond each, made an order take 2 s, as it needs the loop several times."""

_SAID_EVERY_S = 10.0

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How many connections and event streams: in all, and of one client.

    Attributes:
        of_client: connections of one address.
        of_key: requests of one key that are under way, wherever they come from; of one address
            where no keys are asked for.
    """

    connections: int
    of_client: int
    of_key: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What the settings say, as far as this process may open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = settings.connections
        if files != resource.RLIM_INFINITY:
            room = max(1, min(room, files - OTHER_FILES - HEALTH_RESERVE))
        share = max(1, room // _CLIENT_SHARE)
        of_client = min(room, settings.client_connections or share)
        of_key = share if settings.keys_required else of_client
        return cls(connections=room, of_client=of_client, of_key=of_key)

    @property
    def streams(self) -> int:
        return max(1, self.connections // _STREAMS_SHARE)

    @property
    def streams_of_key(self) -> int:
        """Event streams of one key; of one address where none is asked for."""
        return max(1, self.of_key // _STREAMS_SHARE)


def raise_file_limit() -> None:
    """Let this process open as many files as it may at all."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # a sandbox may forbid it; the limits follow from it
        log.warning("the limit of open files stays", files=files, error=str(error))


class Connection(Protocol):
    """What is known of a connection here.

    Attributes:
        client_name: who is at the other end, see `client_of`; empty if unknown.
        deadline: the time of the event loop's clock at which it is `late`.
    """

    client_name: str
    deadline: float

    def late(self) -> None:
        """End it: it is past its deadline."""

    def evict(self) -> None:
        """End it at once: another takes its place."""


@dataclass(slots=True)
class _Client:
    """The connections of one address."""

    open: int = 0
    waiting: dict[Connection, None] = field(default_factory=dict)  # who waits longest, first
    begun: int = 0  # requests, in this turn of the event loop
    deferred: deque[Callable[[], None]] = field(default_factory=deque)


class Connections:
    """The connections of one server.

    Args:
        idle_s: longest time without a request.
        request_s: longest time for a head, for a body, and for taking a piece of an answer.
    """

    def __init__(self, limits: Limits, *, idle_s: float, request_s: float) -> None:
        self.idle_s = idle_s
        self.request_s = request_s
        self._limits = limits
        self._clients: dict[str, _Client] = {}
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # who waits longest, first
        self._reserve: dict[Connection, None] = {}
        self._beginning: dict[str, _Client] = {}
        self._every_s = min(1.0, idle_s / 4, request_s / 4)
        self._sweeping: asyncio.TimerHandle | None = None
        self._said_at, self._times = -_SAID_EVERY_S, 0
        self._may_open_files = True

    def __len__(self) -> int:
        return len(self._open) + len(self._reserve)

    def admit(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> bool:
        """Take a new connection in; False: it may ask for the service's health and nothing else."""
        if self._sweeping is None:
            self._sweeping = loop.call_later(self._every_s, self._sweep, loop)
        name = connection.client_name
        mine = self._clients.get(name, _Client())
        if mine.open >= self._limits.of_client:
            self._say(connection, "its address has as many connections as it may")
            self._evict(mine.waiting)
        elif len(self._open) >= self._limits.connections:
            self._say(connection, "there are as many connections as there may be")
            self._evict(self._waiting)
        if mine.open >= self._limits.of_client or len(self._open) >= self._limits.connections:
            if len(self._reserve) >= HEALTH_RESERVE:
                self._evict(self._reserve)
            self._reserve[connection] = None
            return False
        self._clients[name] = mine  # evicting its last connection has forgotten it
        mine.open += 1
        self._open.add(connection)
        self.waits(connection)
        return True

    def begin(
        self, name: str, request: Callable[[], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Begin a request of that address, now or in one of the loop's next turns."""
        client = self._clients.get(name)
        if client is None:  # in the reserve
            request()
            return
        if client.begun < _BEGIN_AT_ONCE:
            client.begun += 1
            request()
        else:
            client.deferred.append(request)
        if not self._beginning:
            loop.call_soon(self._next_turn, loop)
        self._beginning[name] = client

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        before, self._beginning = self._beginning, {}
        for name, client in before.items():
            client.begun = min(len(client.deferred), _BEGIN_AT_ONCE)
            for _ in range(client.begun):
                client.deferred.popleft()()
            if client.begun:
                self._beginning[name] = client
        if self._beginning:
            loop.call_soon(self._next_turn, loop)

    def waits(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None
            self._clients[connection.client_name].waiting[connection] = None

    def works(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._clients[connection.client_name].waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """It is no more; may be said twice."""
        self._reserve.pop(connection, None)
        if connection not in self._open:
            return
        self.works(connection)
        self._open.discard(connection)
        client = self._clients[connection.client_name]
        client.open -= 1
        if not client.open:
            del self._clients[connection.client_name]

    def _evict(self, waiting: dict[Connection, None]) -> None:
        longest = next(iter(waiting), None)
        if longest is not None:
            self.closed(longest)
            longest.evict()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in [*self._open, *self._reserve]:
            if now >= connection.deadline:
                connection.late()
        self._look_for_files()
        self._sweeping = loop.call_later(self._every_s, self._sweep, loop) if len(self) else None

    def _look_for_files(self) -> None:
        """Say it once if no file can be opened: the loop then hangs up on new clients unheard."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
            self._may_open_files = True
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._may_open_files:
                self._may_open_files = False
                log.error("connections refused: too many open files", error=error.strerror)  # noqa: TRY400

    def _say(self, connection: Connection, why: str) -> None:
        """Log it, but not each time: it happens too often."""
        self._times += 1
        if time.monotonic() - self._said_at < _SAID_EVERY_S:
            return
        log.warning(
            "connection limit reached",
            reason=why,
            client=connection.client_name,
            open=len(self),
            times=self._times,
        )
        self._said_at, self._times = time.monotonic(), 0
