"""Handles to wait on tuning jobs.

The job runs in the service. It goes on if the handle is dropped, if `wait` times out, and if the
connection breaks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, closing
from typing import Any, Self

from gemmsmith.answers.answer import TunedAnswer
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import JobState
from gemmsmith.errors import JobCancelled, JobFailed
from gemmsmith.http import job_calls
from gemmsmith.http.events import follow
from gemmsmith.http.jobs import JobEvent, JobStatus
from gemmsmith.http.progress import progress as display_of
from gemmsmith.http.retry import Patience
from gemmsmith.http.session import Session

OnProgress = Callable[[JobStatus], None]


class Handle:
    """The common part of both kinds of handle. `status` is that of the last answer or event."""

    def __init__(self, session: Session, status: JobStatus) -> None:
        self.status = status
        self._session = session
        self._sender = session.sender
        self._won_on: str | None = None

    @classmethod
    async def of(
        cls, session: Session, call: Coroutine[Any, Any, JobStatus], wait: Patience | None = None
    ) -> Self:
        """The handle of the job that a call returns. With `wait`, once the job has ended."""
        handle = cls(session, await call)
        if wait is not None:
            await handle._winner(wait.left(), None, False)
        return handle

    @property
    def id(self) -> str:
        """The job's identifier in the service."""
        return self.status.id

    @property
    def problem(self) -> Problem:
        """The problem that the job tunes."""
        return self.status.problem

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status.line}>"

    def _repr_html_(self) -> str:
        return self.status._repr_html_()

    async def _updated(self, call: Coroutine[Any, Any, JobStatus]) -> JobStatus:
        self.status = await call
        return self.status

    def _note(self, event: JobEvent) -> None:
        self.status = self.status.updated(event)
        # The winner of a job for any device belongs to a device model, which the event names.
        if event.kind == "winner" and isinstance(event.data.get("device"), str):
            self._won_on = event.data["device"]

    async def _events(self, after: str) -> AsyncGenerator[JobEvent, None]:
        async with aclosing(follow(self._session, self.id, after=after)) as events:
            async for event in events:
                if event is not None:
                    self._note(event)
                    yield event

    async def _winner(
        self, timeout: float | None, on_progress: OnProgress | None, progress: bool
    ) -> TunedAnswer:
        deadline = None if timeout is None else time.monotonic() + timeout
        followed = follow(self._session, self.id, deadline=deadline)
        with closing(display_of(progress)) as display:
            display.show(self.status)
            async with aclosing(followed) as events:
                async for event in events:
                    if event is not None:
                        self._note(event)
                        display.show(self.status)
                        if on_progress is not None:
                            on_progress(self.status)
                    late = deadline is not None and time.monotonic() >= deadline
                    if late and not self.status.state.terminal:
                        raise TimeoutError(
                            f"job {self.id} is still {self.status.state} after {timeout:g} s; it "
                            "goes on: wait again, or cancel it"
                        )
        status = await self._updated(job_calls.job(self._session, self.id))
        if status.state is JobState.FAILED:
            raise JobFailed(status.error or f"job {status.id} failed without a reason")
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {status.id} for {status.problem} was cancelled")
        return await job_calls.winner_of(self._session, status, self._won_on)


class TuningJob(Handle):
    """A tuning job of the synchronous client."""

    def refresh(self) -> JobStatus:
        """Fetch the status of the job."""
        return self._sender.run(self._updated(job_calls.job(self._session, self.id)))

    def cancel(self) -> JobStatus:
        """Cancel the job; it stops before its next candidate."""
        return self._sender.run(self._updated(job_calls.cancel(self._session, self.id)))

    def retry(self) -> TuningJob:
        """Request this failed or cancelled job again, as a new job."""
        call = job_calls.retry(self._session, self.id, Patience(0.0))
        return self._sender.run(self.of(self._session, call))

    def events(self, after: str = "") -> Iterator[JobEvent]:
        """Each event after `after`, as it happens, until the job ends; reconnects if needed."""
        return self._sender.iterate(self._events(after))

    def wait(
        self,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        *,
        progress: bool = False,
    ) -> TunedAnswer:
        """Wait for the job's winner. Its `served` is the answer of lookups.

        Args:
            timeout: seconds; None waits as long as the service answers.
            on_progress: called with the status after every event.
            progress: show the progress, below a notebook's cell or on standard error.

        Raises:
            TimeoutError: the job did not end in time; it goes on.
            JobFailed, JobCancelled: the job ended without a winner.
            ServiceUnavailable: the service did not answer, even after retries.
        """
        return self._sender.run(self._winner(timeout, on_progress, progress))
