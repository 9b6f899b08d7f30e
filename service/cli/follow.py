"""Following jobs of a service: how far they are, that nobody works on them, how to cancel them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemmsmith.errors import GemmsmithError
from gemmsmith.tuning import JobState

if TYPE_CHECKING:
    from gemmsmith.client import Client
    from gemmsmith.handles import TuningJob
    from gemmsmith.jobs import JobStatus
    from service.cli.progress import Reporter

PATIENCE_S = 5.0
"""A worker that lives takes a waiting job within a second; so long without one is worth a word."""


def show(status: JobStatus, says: Reporter) -> None:
    """Report how far a job is."""
    says.update(status.phase or status.state, status.done, status.total, best_us=status.best_us)


def cancelling(jobs: Sequence[str], url: str | None) -> str:
    """The command that cancels jobs."""
    where = f" --url {url}" if url else ""
    return f"gemmsmith jobs cancel {' '.join(jobs)}{where}"


def abandoned(jobs: Sequence[str], url: str | None) -> str:
    """What is left behind by somebody who stops waiting."""
    if not jobs:
        return "interrupted: all jobs have ended"
    goes_on = "the job goes on" if len(jobs) == 1 else f"{len(jobs)} jobs go on"
    return f"interrupted: {goes_on}; to cancel: {cancelling(jobs, url)}"


def idle(client: Client, job: str) -> str | None:
    """Why a job still waits, as far as the service tells; None once it does not wait.

    Raises:
        GemmsmithError: no answer.
    """
    status = client.job_status(job)
    if status.state is not JobState.WAITING:
        return None
    running = sum(1 for _ in client.jobs(state=JobState.RUNNING, limit=100))
    if running:
        return f"  waiting: {running} other jobs are running"
    return (
        f"  waiting: the service runs no job at all, so no worker seems to be alive. Start one on "
        f"its machine: gemmsmith worker. To cancel: {cancelling([job], client.url)}"
    )


@contextmanager
def waiting(client: Client, job: TuningJob, says: Reporter) -> Iterator[None]:
    """Within it, say once why the job waits, if it does for longer than a worker takes."""
    ended = threading.Event()

    def look() -> None:
        if ended.wait(PATIENCE_S):
            return
        try:
            found = idle(client, job.id)
        except GemmsmithError:
            return  # whoever waits for the job is told
        if found is not None and not ended.is_set():
            says.line(found)

    thread = threading.Thread(target=look, name=f"waiting-{job.id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
