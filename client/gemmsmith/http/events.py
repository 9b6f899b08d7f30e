"""A job's event stream: server-sent events (WHATWG HTML, section 9.2.6), resumed until it ends."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

import msgspec

from gemmsmith.core.bounds import BOUNDS, Bounds, exceeded
from gemmsmith.errors import ServiceFault, ServiceUnavailable
from gemmsmith.http.job_calls import job
from gemmsmith.http.jobs import FINAL_EVENTS, JobEvent
from gemmsmith.http.replies import NoAnswer, Reply, Response, check
from gemmsmith.http.requests import Request, job_path
from gemmsmith.http.session import Session

SILENCE_S = 45.0
"""The service sends a comment every 15 s; three missed ones mean that the connection is dead."""


async def follow(
    session: Session, identifier: str, *, after: str = "", deadline: float | None = None
) -> AsyncGenerator[JobEvent | None, None]:
    """`GET /jobs/{id}/events` until the job ends; resumes after the last event received.

    Sometimes yields None, at the latest at `deadline` (of `time.monotonic()`), so that the reader
    can check its clock. A stream survives restarts of the service: after every event the count of
    attempts to resume it starts again. If all attempts fail, raises ServiceUnavailable.
    """
    policy = replace(session.retry, retries=session.retry.retries * 3)
    parser = EventParser(identifier, after, session.setup.bounds)
    attempt, over = 0, False

    def left() -> float:
        return SILENCE_S if deadline is None else max(0.05, deadline - time.monotonic())

    while True:
        reply: Reply = Response(status=200)  # kept if the stream ends without an error
        parser.restart()
        async with aclosing(session.sender.stream(_request(identifier, parser, left()))) as pieces:
            async for piece in pieces:
                if not isinstance(piece, bytes):
                    reply = piece
                    continue
                for event in parser.feed(piece):
                    attempt, over = 0, over or event.kind in FINAL_EVENTS
                    yield event
                yield None
        if over:
            return
        if isinstance(reply, Response) and reply.status < 400:
            if (await job(session, identifier)).state.terminal:
                return
            reply = NoAnswer(reason="the event stream ended before the job did")
        yield None
        delay = policy.delay(attempt, reply)
        attempt += 1
        if delay is not None:
            await session.sender.sleep(min(delay, left()))
        elif isinstance(reply, Response):
            check(reply)
        else:
            raise ServiceUnavailable(
                f"lost the events of job {identifier}: {reply.reason}. The job goes on; wait for "
                "it again when the service is back"
            )


def _request(identifier: str, parser: EventParser, seconds: float) -> Request:
    request = Request(
        method="GET",
        path=f"{job_path(identifier)}/events",
        headers=(
            ("accept", "text/event-stream"),
            ("accept-encoding", "identity"),
            ("cache-control", "no-cache"),
        ),
        read_timeout=min(seconds, SILENCE_S),
    )
    return request.with_header("last-event-id", parser.last_id)


class EventParser:
    """Parses events from pieces of bytes of any size.

    An event that was incomplete when the connection broke is not reported. The next connection
    requests everything after `last_id`.
    """

    def __init__(self, job: str, last_id: str = "", bounds: Bounds = BOUNDS) -> None:
        self.last_id = last_id
        self._job = job
        self._bounds = bounds
        self.restart()

    def restart(self) -> None:
        """Forget an incomplete event, because a new connection begins."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._kind = ""
        self._data: list[str] = []
        self._length = 0
        self._id = self.last_id

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Yields the events that these bytes complete.

        Raises:
            ServiceFault: an event, with its incomplete line, is longer than `event_bytes`.
        """
        self._text += self._decoder.decode(chunk)
        # A trailing CR may be the first half of CRLF, so it waits for the next piece.
        held = "\r" if self._text.endswith("\r") else ""
        text = self._text.removesuffix("\r")
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._text = rest + held
        for line in lines:
            if line:
                self._field(line)
            elif (event := self._dispatch()) is not None:
                yield event
        if self._length + len(self._text) > self._bounds.event_bytes:
            reason = exceeded(f"an event of job {self._job}", "event_bytes", self._bounds)
            raise ServiceFault(200, "Answer refused", reason)

    def _field(self, line: str) -> None:
        self._length += len(line)
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._kind = value
            case "data":
                self._data.append(value)
            case "id" if value.isprintable():  # it is sent back in a header
                self._id = value
            case _:  # comments have an empty name, and keep the connection alive
                pass

    def _dispatch(self) -> JobEvent | None:
        self.last_id = self._id
        kind, text = self._kind or "message", "\n".join(self._data)
        is_empty = not self._data
        self._kind, self._data, self._length = "", [], 0
        if is_empty:
            return None
        try:
            data = msgspec.json.decode(text.encode())
        except (msgspec.DecodeError, RecursionError):
            data = {"text": text}
        return JobEvent(
            id=self.last_id, kind=kind, data=data if isinstance(data, dict) else {"value": data}
        )
