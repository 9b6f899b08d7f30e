"""Event streams: one look at the database for all of them, and only so many at once.

A stream reads what its client has missed, then waits. Every `events_poll_s` one thread reads what
is new about all jobs that are followed, and wakes the streams of those where there is something;
the last events of each are kept, so that 300 streams of a job read them once. A stream ends after
the job's last event, when the server stops, and when its client's key does not work any more.

All but the reading runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import structlog
from anyio import CapacityLimiter, move_on_after, to_thread

from service import documents
from service.errors import ProblemError
from service.http.connections import Limits
from service.http.turns import Shares
from tuner.errors import JobNotFound, StoreError
from tuner.jobs import Queue, RecordedEvent
from tuner.jobs.news import News

TERMINAL_EVENTS = frozenset({"finished", "failed", "cancelled"})

_EVENTS_AT_ONCE = 200
"""Read for one client that has missed more; and kept of each job that is followed."""

_AT_A_TIME = 50
"""Streams whose keys are checked before the event loop does something else."""

_READERS = 4
"""Threads in which streams read what their clients have missed."""

log = structlog.get_logger("gemmsmith.service")


@dataclass(frozen=True, slots=True)
class _Event:
    """An event as it goes over the wire."""

    number: int
    wire: bytes
    is_last: bool

    @classmethod
    def of(cls, event: RecordedEvent) -> _Event:
        data = msgspec.json.encode(documents.job_event(event))
        wire = b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), data)
        return cls(event.id, wire, event.kind in TERMINAL_EVENTS)


@dataclass(slots=True, eq=False)
class _Stream:
    """One client's stream."""

    job: str
    is_welcome: Callable[[], bool]
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False


@dataclass(slots=True)
class _Watched:
    """A job that clients follow.

    Attributes:
        newest: the number of its newest event; None before it was looked for.
        events: the last ones up to that, without gaps.
        is_over: its last event is among them.
    """

    streams: set[_Stream] = field(default_factory=set)
    newest: int | None = None
    events: deque[_Event] = field(default_factory=lambda: deque(maxlen=_EVENTS_AT_ONCE))
    is_over: bool = False

    def since(self, after: int) -> list[_Event] | None:
        """What comes after that number; None where that is not known here."""
        if self.newest is None:
            return None
        if after < self.newest and not (self.events and self.events[0].number <= after + 1):
            return None
        return [event for event in self.events if event.number > after]


class Streams:
    """The event streams of one service.

    Args:
        catch_up: called in a thread before clients learn that a job is over.
        stopping: set when the server begins to stop.
        poll_s: time between two looks at the database.
        heartbeat_s: a stream without news sends a comment this often.
    """

    def __init__(
        self,
        queue: Queue,
        news: News,
        limits: Limits,
        *,
        catch_up: Callable[[], None],
        stopping: threading.Event,
        poll_s: float,
        heartbeat_s: float,
    ) -> None:
        self._queue = queue
        self._news = news
        self._limits = limits
        self._catch_up = catch_up
        self._stopping = stopping
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._clients = Shares(
            limits.streams_of_key, lambda limit: _full(429, f"{limit} may be open of one client")
        )
        self._followed: dict[str, _Watched] = {}
        self._readers = CapacityLimiter(_READERS)
        self._looker = CapacityLimiter(1)
        self._poller: asyncio.Task[None] | None = None
        self._answered = True

    @contextmanager
    def admitted(self, client: str) -> Iterator[None]:
        """While entered, that client has one stream more.

        Raises:
            ProblemError: 429, it has as many as it may; 503, all have together.
        """
        with self._clients.admitted(client):
            if self._clients.total() > self._limits.streams:
                raise _full(503, f"{self._limits.streams} may be open")
            yield

    async def events(
        self, job: str, after: int, is_welcome: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """The job's events after that number, in wire format, until `is_welcome` says no.

        Raises:
            StoreError: what the client has missed cannot be read; it resumes later.
        """
        yield b"retry: 1000\n\n"
        stream = _Stream(job, is_welcome)
        followed = self._join(stream)
        is_first = True
        try:
            while not stream.is_over:
                stream.woken.clear()
                is_over = followed.is_over
                known = None if is_first else followed.since(after)
                if known is not None:
                    events = known
                else:  # the first time, too: that the job is over may have been missed
                    is_first = False
                    is_over, events = await to_thread.run_sync(
                        self._missed, job, after, limiter=self._readers
                    )
                for event in events:
                    after = event.number
                    yield event.wire
                    if event.is_last:
                        return
                if len(events) == _EVENTS_AT_ONCE:
                    continue
                if is_over:
                    return
                with move_on_after(self._heartbeat_s) as waiting:
                    await stream.woken.wait()
                if waiting.cancelled_caught:
                    yield b": still here\n\n"
        finally:
            followed.streams.discard(stream)
            if not followed.streams and self._followed.get(job) is followed:
                del self._followed[job]

    def _join(self, stream: _Stream) -> _Watched:
        stream.is_over = self._stopping.is_set()
        followed = self._followed.setdefault(stream.job, _Watched())
        followed.streams.add(stream)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        return followed

    async def _poll(self) -> None:
        """While any client follows: look for news, and for clients that may no longer have them."""
        looking: asyncio.Task[None] | None = None
        while self._followed:
            await self._dismiss()
            if looking is None or looking.done():  # a database that hangs must not keep this task
                looking = asyncio.create_task(self._look())
            await asyncio.sleep(self._poll_s)

    async def _dismiss(self) -> None:
        stopping = self._stopping.is_set()
        streams = [stream for followed in self._followed.values() for stream in followed.streams]
        for number, stream in enumerate(streams):
            if stopping or not stream.is_welcome():
                stream.is_over = True
                stream.woken.set()
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    async def _look(self) -> None:
        known = {job: followed.newest for job, followed in self._followed.items()}
        try:
            newest, events = await to_thread.run_sync(self._read, known, limiter=self._looker)
        except Exception as error:  # of any kind: were this to end, streams would hang for ever
            if self._answered:
                fault = not isinstance(error, StoreError)
                log.warning("events not read", error=str(error), exc_info=fault)
            self._answered = False
            return
        self._answered = True
        for job, number in newest.items():
            followed = self._followed.get(job)
            if followed is None or followed.newest != known[job]:
                continue  # it has no followers any more, or new ones
            followed.newest = number
            new = events.get(job, [])
            if not new or (followed.events and followed.events[-1].number + 1 != new[0].number):
                followed.events.clear()
            followed.events.extend(new)
            followed.is_over = any(event.is_last for event in new)
            for stream in followed.streams:
                stream.woken.set()

    def _read(
        self, known: Mapping[str, int | None]
    ) -> tuple[Mapping[str, int], Mapping[str, list[_Event]]]:
        """Of jobs with news: the newest event's number, and those since the one known."""
        newest = {
            job: number for job, number in self._news.newest(known).items() if number != known[job]
        }
        few = {
            job: after
            for job in newest
            if (after := known[job]) is not None and newest[job] - after <= _EVENTS_AT_ONCE
        }
        events: dict[str, list[_Event]] = {}
        for event in self._news.since(few) if few else ():
            events.setdefault(event.job, []).append(_Event.of(event))
        for job, new in events.items():
            newest[job] = new[-1].number  # of a later moment than that of the first query
        if any(event.is_last for new in events.values() for event in new):
            self._catch_up()
        return newest, events

    def _missed(self, job: str, after: int) -> tuple[bool, list[_Event]]:
        """Whether the job is over, and its next events.

        In this order: of a job that is over here, the last event cannot be missing there.
        """
        try:
            final = self._queue.get(job).state.terminal
        except JobNotFound:
            return True, []
        events = [_Event.of(event) for event in self._queue.events(job, after, _EVENTS_AT_ONCE)]
        if final or any(event.is_last for event in events):
            self._catch_up()
        return final, events


def _full(status: int, detail: str) -> ProblemError:
    return ProblemError(
        status=status,
        kind="too-many-streams",
        title="Too many event streams",
        detail=f"{detail} at once; close some, or poll the job instead.",
        headers={"Retry-After": "5"},
    )
