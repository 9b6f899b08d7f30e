"""Tuning jobs as the service reports them, and handles to wait on them.

A handle only asks; the job lives in the service and goes on when the handle is dropped, when
`wait` times out and when the connection breaks. Event streams resume after the last event seen.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from gemmsmith.answer import Answer
from gemmsmith.errors import (
    InvalidProblem,
    JobCancelled,
    JobFailed,
    ServiceFault,
    ServiceUnavailable,
)
from gemmsmith.problem import Problem
from gemmsmith.retry import RetryPolicy
from gemmsmith.sse import EventParser
from gemmsmith.tuning import Effort
from gemmsmith.wire import NoAnswer, Reply, Request, Response, check

if TYPE_CHECKING:
    from gemmsmith.aio import AsyncClient
    from gemmsmith.client import Client


class JobState(StrEnum):
    """Where a job is in its life."""

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a worker holds it
    DONE = "done"  # a winner was promoted
    FAILED = "failed"  # given up; `error` says why
    CANCELLED = "cancelled"  # stopped because somebody asked

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job as it was when the service answered.

    Attributes:
        calls: how often its callers run the problem, all requests together.
        expected_saving_us: microseconds that tuning is expected to save in these calls together;
            None where nobody gave any.
        phase: step of the tuning run; empty while waiting.
        done, total: candidates (kernels while compiling) of this phase.
        best_us, best: fastest candidate so far, microseconds per launch, and its key.
        winner_revision: revision of the promoted winner, once done.
        deadline_at: time after which it is given up unless it has a winner; None for never.
        ordered_by: name of the API key that ordered it.
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
    error: str | None = None
    attempt: int = 0
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    winner_revision: int | None = None
    deadline_at: str | None = None
    ordered_by: str | None = None

    def updated(self, event: JobEvent) -> JobStatus:
        """The status with what an event says; fields the event lacks stay as they are."""
        told = {name: event.data[name] for name in _TOLD if name in event.data}
        return replace(self, state=_STATE_OF.get(event.kind, self.state), **told)


_STATE_OF = {
    "started": JobState.RUNNING,
    "progress": JobState.RUNNING,
    "finished": JobState.DONE,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
_TOLD = ("phase", "done", "total", "best_us", "best", "error")
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


def job_status_of(row: Any) -> JobStatus:
    """A job in a listing.

    Raises:
        ServiceFault: not a job.
    """
    try:
        return msgspec.convert(row, JobStatus)
    except (msgspec.ValidationError, InvalidProblem) as error:
        raise ServiceFault(200, "Unreadable answer", f"a list of jobs with {error}") from error


class EventCursor:
    """Where a reader is in a job's event stream; says what to ask for and when to give up.

    Pure bookkeeping: the clients own the connection. The attempts budget is per silence, not per
    stream: every event received makes the patience whole again.
    """

    READ_TIMEOUT_S = 45.0
    """The service sends a comment every 15 s; three missed ones mean the connection is dead."""

    def __init__(self, job: str, retry: RetryPolicy, after: str = "") -> None:
        self.job = job
        self.finished = False
        self._retry = retry
        self._attempt = 0
        self._parser = EventParser(after)

    @property
    def last_id(self) -> str:
        """Identifier of the last event received; empty before the first."""
        return self._parser.last_id

    def request(self, read_timeout: float | None = None) -> Request:
        """The request that continues the stream."""
        self._parser.restart()
        headers = [("accept", "text/event-stream"), ("cache-control", "no-cache")]
        if self.last_id:
            headers.append(("last-event-id", self.last_id))
        return Request(
            method="GET",
            path=f"/jobs/{self.job}/events",
            headers=tuple(headers),
            read_timeout=min(read_timeout or self.READ_TIMEOUT_S, self.READ_TIMEOUT_S),
        )

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Events completed by these bytes."""
        for found in self._parser.feed(chunk):
            self._attempt = 0
            try:
                data = msgspec.json.decode(found.data.encode())
            except msgspec.DecodeError:
                data = {"text": found.data}
            self.finished = self.finished or found.event in FINAL_EVENTS
            yield JobEvent(
                id=found.id,
                kind=found.event,
                data=data if isinstance(data, dict) else {"value": data},
            )

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
            f"lost the events of job {self.job}: {reason}. The job itself goes on; ask for it "
            "again once the service is back"
        )


def check_deadline(status: JobStatus, timeout: float | None, deadline: float | None) -> None:
    """Do nothing while there is time, or once the job is over.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if timeout is None or deadline is None or status.state.terminal:
        return
    if time.monotonic() >= deadline:
        raise TimeoutError(
            f"job {status.id} is still {status.state} after {timeout:g} s; it goes on, "
            "wait again or cancel it"
        )


def outcome(status: JobStatus) -> None:
    """Return for a finished job that has a winner.

    Raises:
        JobFailed: it ended without one.
        JobCancelled: it was cancelled.
    """
    if status.state is JobState.FAILED:
        raise JobFailed(status.error or f"job {status.id} failed without saying why")
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"job {status.id} for {status.problem} was cancelled")


class _Handle:
    """What both kinds of handle know. `status` is as of the last answer or event."""

    def __init__(self, status: JobStatus) -> None:
        self.status = status
        self._won_on: str | None = None

    def _note(self, event: JobEvent) -> None:
        self.status = self.status.updated(event)
        # A job for any device becomes one device model's winner: the event says which.
        if event.kind == "winner" and isinstance(event.data.get("device"), str):
            self._won_on = event.data["device"]

    @property
    def id(self) -> str:
        """The job's identifier in the service."""
        return self.status.id

    @property
    def problem(self) -> Problem:
        """What is being tuned."""
        return self.status.problem

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.problem}: {self.status.state}>"


class TuningJob(_Handle):
    """A tuning job of the synchronous client."""

    def __init__(self, client: Client, status: JobStatus) -> None:
        super().__init__(status)
        self._client = client

    def refresh(self) -> JobStatus:
        """Ask the service how far the job is."""
        self.status = self._client.job_status(self.id)
        return self.status

    def cancel(self) -> JobStatus:
        """Ask for the job to stop; it does so before its next candidate."""
        self.status = self._client.cancel(self.id)
        return self.status

    def retry(self) -> TuningJob:
        """Order anew what this job failed to do, or was cancelled before: another job."""
        return self._client.retry(self.id)

    def events(self, after: str = "") -> Iterator[JobEvent]:
        """Every event after `after`, as it happens, until the job ends; survives reconnects."""
        for event in self._client.job_events(self.id, after=after):
            if event is not None:
                self._note(event)
                yield event

    def wait(
        self,
        timeout: float | None = None,
        on_progress: Callable[[JobStatus], None] | None = None,
    ) -> Answer:
        """Wait for the winner.

        Args:
            timeout: seconds; None waits as long as the service answers.
            on_progress: called with the status after every event.

        Raises:
            TimeoutError: not finished in time; the job goes on.
            JobFailed, JobCancelled: it ended without a winner.
            ServiceUnavailable: the service stopped answering for longer than retries cover.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for event in self._client.job_events(self.id, deadline=deadline):
            if event is not None:
                self._note(event)
                if on_progress is not None:
                    on_progress(self.status)
            check_deadline(self.status, timeout, deadline)
        outcome(self.refresh())
        return self._client.winner_of(self.status, self._won_on)


class AsyncTuningJob(_Handle):
    """A tuning job of the asynchronous client; the same methods, awaited."""

    def __init__(self, client: AsyncClient, status: JobStatus) -> None:
        super().__init__(status)
        self._client = client

    async def refresh(self) -> JobStatus:
        """Ask the service how far the job is."""
        self.status = await self._client.job_status(self.id)
        return self.status

    async def cancel(self) -> JobStatus:
        """Ask for the job to stop; it does so before its next candidate."""
        self.status = await self._client.cancel(self.id)
        return self.status

    async def retry(self) -> AsyncTuningJob:
        """Order anew what this job failed to do, or was cancelled before: another job."""
        return await self._client.retry(self.id)

    async def events(self, after: str = "") -> AsyncIterator[JobEvent]:
        """Every event after `after`, as it happens, until the job ends; survives reconnects."""
        async for event in self._client.job_events(self.id, after=after):
            if event is not None:
                self._note(event)
                yield event

    async def wait(
        self,
        timeout: float | None = None,
        on_progress: Callable[[JobStatus], None] | None = None,
    ) -> Answer:
        """Wait for the winner; as `TuningJob.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        async for event in self._client.job_events(self.id, deadline=deadline):
            if event is not None:
                self._note(event)
                if on_progress is not None:
                    on_progress(self.status)
            check_deadline(self.status, timeout, deadline)
        outcome(await self.refresh())
        return await self._client.winner_of(self.status, self._won_on)
