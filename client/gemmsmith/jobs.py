"""Tuning jobs as the service reports them: their status, and their events as a stream.

Event streams resume after the last event seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gemmsmith.answers import understood
from gemmsmith.bounds import BOUNDS, Bounds, exceeded
from gemmsmith.device import time_text
from gemmsmith.errors import ServiceFault, ServiceUnavailable
from gemmsmith.http.replies import NoAnswer, Reply, Response, check
from gemmsmith.http.requests import Request, job_path
from gemmsmith.http.retry import RetryPolicy
from gemmsmith.http.sse import EventParser, EventTooLong, ServerEvent
from gemmsmith.plain import Plain
from gemmsmith.problem import Problem
from gemmsmith.showing import bar, line, table
from gemmsmith.tuning import Effort, JobState


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class JobStatus(Plain):
    """A job as it was when the service answered.

    Attributes:
        calls: how often its callers run the problem, all requests together.
        expected_saving_us: microseconds that tuning is expected to save in these calls together;
            None where nobody gave any.
        phase: step of the tuning run; empty while waiting.
        done, total: candidates (kernels while compiling) of this phase.
        best_us, best: microseconds per launch of what is ahead, and its key, or the default's
            name: by the finals as soon as there were any, else by the screening.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        winner_revision: revision of the promoted winner, once done.
        deadline_at: time after which it is given up unless it has a winner; None for never.
        ordered_by: name of the API key that requested it.
        waits: what a waiting job waits for, in words, and whether a worker is alive that can take
            it; empty if the service did not say.
    """

    id: str
    state: JobState
    problem: Problem
    effort: Effort = Effort.DEFAULT
    device: str = ""
    priority: int = 0
    calls: int = 0
    expected_saving_us: float | None = None
    phase: str = ""
    done: int = 0
    total: int = 0
    best_us: float | None = None
    best: str | None = None
    recorded: str = ""
    error: str | None = None
    attempt: int = 0
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    winner_revision: int | None = None
    deadline_at: str | None = None
    ordered_by: str | None = None
    waits: str = ""

    def updated(self, event: JobEvent) -> JobStatus:
        """The status with what an event says; fields the event lacks stay as they are."""
        names = _Progress.__struct_fields__
        values = {name: event.data[name] for name in names if name in event.data}
        try:
            msgspec.convert(values, _Progress)
        except msgspec.ValidationError:  # of another version, or of a broken service
            values = {}
        state = _STATE_OF.get(event.kind, self.state)
        waits = self.waits if state is JobState.WAITING else ""
        return replace(self, state=state, waits=waits, **values)

    @property
    def best_time(self) -> str:
        """`best_us` for people; empty while nothing was timed."""
        return "" if self.best_us is None else time_text(self.best_us, self.recorded, 1)

    @property
    def line(self) -> str:
        """The job in a line: which, of what, where it stands, how far it is."""
        parts = (
            self.state.value,
            f"{self.phase} {bar(self.done, self.total)}".strip() if self._runs else "",
            f"best {self.best_time}" if self.best_time else "",
            self.waits,
            self.error or "",
        )
        return line(f"{self.id} {self.problem}: {', '.join(part for part in parts if part)}")

    @property
    def _runs(self) -> bool:
        return self.state is JobState.RUNNING

    def __repr__(self) -> str:
        return f"<JobStatus {self.line}>"

    def _repr_html_(self) -> str:
        best = f"{self.best_time} {self.best or ''}" if self.best_time else None
        rows = {
            "job": self.id,
            "state": self.state.value,
            "phase": self.phase if self._runs else None,
            "progress": bar(self.done, self.total) if self._runs else None,
            "best so far": best,
            "device": self.device,
            "error": self.error,
        }
        return table(str(self.problem), rows.items())


_STATE_OF = {
    "started": JobState.RUNNING,
    "progress": JobState.RUNNING,
    "finished": JobState.DONE,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
_Progress = msgspec.defstruct(
    "Progress",
    [
        ("phase", str, ""),
        ("done", int, 0),
        ("total", int, 0),
        ("best_us", float | None, None),
        ("best", str | None, None),
        ("recorded", str | None, None),
        ("error", str | None, None),
    ],
)
"""What an event says of a job's status."""
FINAL_EVENTS = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Something that happened to a job. `id` orders events and is where a stream resumes.

    Attributes:
        kind: created, started, progress, trial, winner, finished, failed, cancelled; more may
            come.
    """

    id: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def job_statuses_of(rows: list[Any]) -> list[JobStatus]:
    """The jobs of a listing that this version understands."""
    return understood.each(rows, JobStatus, "jobs")


def _event(found: ServerEvent) -> JobEvent:
    try:
        data = msgspec.json.decode(found.data.encode())
    except (msgspec.DecodeError, RecursionError):
        data = {"text": found.data}
    return JobEvent(
        id=found.id, kind=found.event, data=data if isinstance(data, dict) else {"value": data}
    )


class EventCursor:
    """Where a reader is in a job's event stream; says what to ask for and when to give up.

    Pure bookkeeping: the clients own the connection. The attempts budget is per silence, not per
    stream: every event received makes the patience whole again.
    """

    READ_TIMEOUT_S = 45.0
    """The service sends a comment every 15 s; three missed ones mean the connection is dead."""

    def __init__(
        self, job: str, retry: RetryPolicy, after: str = "", bounds: Bounds = BOUNDS
    ) -> None:
        self.job = job
        self.finished = False
        self._retry = retry
        self._attempt = 0
        self._bounds = bounds
        self._parser = EventParser(after, bounds.event_bytes)

    @property
    def last_id(self) -> str:
        """Identifier of the last event received; empty before the first."""
        return self._parser.last_id

    def request(self, read_timeout: float | None = None) -> Request:
        """The request that continues the stream."""
        self._parser.restart()
        headers = [
            ("accept", "text/event-stream"),
            ("accept-encoding", "identity"),
            ("cache-control", "no-cache"),
        ]
        if self.last_id:
            headers.append(("last-event-id", self.last_id))
        return Request(
            method="GET",
            path=f"{job_path(self.job)}/events",
            headers=tuple(headers),
            read_timeout=min(read_timeout or self.READ_TIMEOUT_S, self.READ_TIMEOUT_S),
        )

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Events completed by these bytes.

        Raises:
            ServiceFault: one is longer than the bound `event_bytes`.
        """
        try:
            for found in self._parser.feed(chunk):
                self._attempt = 0
                self.finished = self.finished or found.event in FINAL_EVENTS
                yield _event(found)
        except EventTooLong:
            what = f"an event of job {self.job}"
            raise ServiceFault(
                200, "Answer refused", exceeded(what, "event_bytes", self._bounds)
            ) from None

    @staticmethod
    def patience(deadline: float | None) -> float | None:
        """Seconds of silence to accept before a deadline on `time.monotonic()`'s clock."""
        return None if deadline is None else max(0.05, deadline - time.monotonic())

    def ended(self) -> Response:
        """What to call a stream that the service closed in good order."""
        return Response(status=200)

    def ended_cleanly(self, reply: Reply) -> bool:
        """Whether the service closed the stream by itself: perhaps the job is over."""
        return isinstance(reply, Response) and reply.status < 400

    def interrupted(self, reply: Reply, deadline: float | None = None) -> float:
        """Seconds to wait before asking again, after the stream broke off or was refused.

        Raises:
            ServiceError: the service refused for good.
            ServiceUnavailable: no event and no connection for too long.
        """
        if self.ended_cleanly(reply):
            reply = NoAnswer(reason="the event stream ended before the job did")
        delay = self._retry.delay(self._attempt, reply)
        self._attempt += 1
        if delay is not None:
            limit = self.patience(deadline)
            return delay if limit is None else min(delay, limit)
        if isinstance(reply, Response):
            check(reply)
        reason = reply.reason if isinstance(reply, NoAnswer) else "no answer"
        raise ServiceUnavailable(
            f"lost the events of job {self.job}: {reason}. The job goes on; wait for it "
            "again when the service is back"
        )
