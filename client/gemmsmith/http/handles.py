"""Handles to wait on tuning jobs.

The job runs in the service. It goes on if the handle is dropped, if `wait` times out, and if the
connection breaks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Protocol

from gemmsmith.answers.answer import TunedAnswer
from gemmsmith.errors import JobCancelled, JobFailed
from gemmsmith.jobs import JobEvent, JobStatus
from gemmsmith.problem import Problem
from gemmsmith.progress import Display
from gemmsmith.progress import progress as shown
from gemmsmith.tuning import JobState


def check_deadline(status: JobStatus, timeout: float | None, deadline: float | None) -> None:
    """Do nothing while there is time, or once the job is over.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if timeout is None or deadline is None or status.state.terminal:
        return
    if time.monotonic() >= deadline:
        raise TimeoutError(
            f"job {status.id} is still {status.state} after {timeout:g} s; it goes on: "
            "wait again, or cancel it"
        )


def outcome(status: JobStatus) -> None:
    """Return for a finished job that has a winner.

    Raises:
        JobFailed: it ended without one.
        JobCancelled: it was cancelled.
    """
    if status.state is JobState.FAILED:
        raise JobFailed(status.error or f"job {status.id} failed without a reason")
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

    def _saw(
        self,
        event: JobEvent | None,
        display: Display,
        on_progress: Callable[[JobStatus], None] | None,
    ) -> None:
        """Tell of an event that `wait` has seen; None: only time has passed."""
        if event is None:
            return
        self._note(event)
        display.show(self.status)
        if on_progress is not None:
            on_progress(self.status)

    @property
    def id(self) -> str:
        """The job's identifier in the service."""
        return self.status.id

    @property
    def problem(self) -> Problem:
        """What is being tuned."""
        return self.status.problem

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status.line}>"

    def _repr_html_(self) -> str:
        return self.status._repr_html_()


class JobCalls(Protocol):
    """What a handle asks of its client."""

    def job_status(self, identifier: str, /) -> JobStatus: ...

    def cancel(self, identifier: str, /) -> JobStatus: ...

    def retry(self, identifier: str, /) -> TuningJob: ...

    def winner_of(self, status: JobStatus, device: str | None, /) -> TunedAnswer: ...

    def job_events(
        self, identifier: str, /, *, after: str = ..., deadline: float | None = ...
    ) -> Iterator[JobEvent | None]: ...


class AsyncJobCalls(Protocol):
    """`JobCalls`, awaited."""

    async def job_status(self, identifier: str, /) -> JobStatus: ...

    async def cancel(self, identifier: str, /) -> JobStatus: ...

    async def retry(self, identifier: str, /) -> AsyncTuningJob: ...

    async def winner_of(self, status: JobStatus, device: str | None, /) -> TunedAnswer: ...

    def job_events(
        self, identifier: str, /, *, after: str = ..., deadline: float | None = ...
    ) -> AsyncIterator[JobEvent | None]: ...


class TuningJob(_Handle):
    """A tuning job of the synchronous client."""

    def __init__(self, client: JobCalls, status: JobStatus) -> None:
        super().__init__(status)
        self._client = client

    def refresh(self) -> JobStatus:
        """Fetch the status of the job."""
        self.status = self._client.job_status(self.id)
        return self.status

    def cancel(self) -> JobStatus:
        """Cancel the job; it stops before its next candidate."""
        self.status = self._client.cancel(self.id)
        return self.status

    def retry(self) -> TuningJob:
        """Request this failed or cancelled job again, as a new job."""
        return self._client.retry(self.id)

    def events(self, after: str = "") -> Iterator[JobEvent]:
        """Each event after `after`, as it happens, until the job ends; reconnects if needed."""
        for event in self._client.job_events(self.id, after=after):
            if event is not None:
                self._note(event)
                yield event

    def wait(
        self,
        timeout: float | None = None,
        on_progress: Callable[[JobStatus], None] | None = None,
        *,
        progress: bool = False,
    ) -> TunedAnswer:
        """Wait for what the job finds; its `served` is what lookups answer.

        Args:
            timeout: seconds; None waits as long as the service answers.
            on_progress: called with the status after every event.
            progress: show the progress, below a notebook's cell or on standard error.

        Raises:
            TimeoutError: the job did not end in time; it goes on.
            JobFailed, JobCancelled: the job ended without a winner.
            ServiceUnavailable: the service did not answer, even after retries.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with closing(shown(progress)) as display:
            display.show(self.status)
            for event in self._client.job_events(self.id, deadline=deadline):
                self._saw(event, display, on_progress)
                check_deadline(self.status, timeout, deadline)
        outcome(self.refresh())
        return self._client.winner_of(self.status, self._won_on)


class AsyncTuningJob(_Handle):
    """A tuning job of the asynchronous client; the same methods, awaited."""

    def __init__(self, client: AsyncJobCalls, status: JobStatus) -> None:
        super().__init__(status)
        self._client = client

    async def refresh(self) -> JobStatus:
        """Fetch the status of the job."""
        self.status = await self._client.job_status(self.id)
        return self.status

    async def cancel(self) -> JobStatus:
        """Cancel the job; it stops before its next candidate."""
        self.status = await self._client.cancel(self.id)
        return self.status

    async def retry(self) -> AsyncTuningJob:
        """Request this failed or cancelled job again, as a new job."""
        return await self._client.retry(self.id)

    async def events(self, after: str = "") -> AsyncIterator[JobEvent]:
        """Each event after `after`, as it happens, until the job ends; reconnects if needed."""
        async for event in self._client.job_events(self.id, after=after):
            if event is not None:
                self._note(event)
                yield event

    async def wait(
        self,
        timeout: float | None = None,
        on_progress: Callable[[JobStatus], None] | None = None,
        *,
        progress: bool = False,
    ) -> TunedAnswer:
        """Wait for what the job finds; as `TuningJob.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with closing(shown(progress)) as display:
            display.show(self.status)
            async for event in self._client.job_events(self.id, deadline=deadline):
                self._saw(event, display, on_progress)
                check_deadline(self.status, timeout, deadline)
        outcome(await self.refresh())
        return await self._client.winner_of(self.status, self._won_on)
