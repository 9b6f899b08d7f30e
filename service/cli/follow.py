"""Following jobs of a service: how far they are, that nobody works on them, how to cancel them."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemmsmith.errors import GemmsmithError
from tuner.errors import TunerError

if TYPE_CHECKING:
    from gemmsmith.http.jobs import JobStatus
    from service.cli.progress import Reporter

PATIENCE_S = 3.0
"""A worker that lives takes a waiting job within a second; so long without one is worth a word."""


def show(status: JobStatus, says: Reporter) -> None:
    """Report how far a job is."""
    says.update(status.phase or status.state, status.done, status.total, best=status.best_time)


def cancelling(jobs: Sequence[str], place: Sequence[str]) -> str:
    """The command that cancels jobs; `place` is the option that says where they are, if any."""
    return shlex.join(["gemmsmith", "jobs", "cancel", *jobs, *place])


def abandoned(jobs: Sequence[str], place: Sequence[str]) -> str:
    """What is left behind by somebody who stops waiting."""
    if not jobs:
        return "interrupted: all jobs have ended"
    goes_on = "the job goes on" if len(jobs) == 1 else f"{len(jobs)} jobs go on"
    return f"interrupted: {goes_on}; to cancel: {cancelling(jobs, place)}"


@contextmanager
def waiting(look: Callable[[], JobStatus], place: Sequence[str], says: Reporter) -> Iterator[None]:
    """Within it, say what a job waits for, whenever that is something new.

    `look` asks how the job is.
    """
    over = threading.Event()

    def watch() -> None:
        said = ""
        while not over.wait(PATIENCE_S):
            try:
                status = look()
            except (GemmsmithError, TunerError):
                continue  # whoever waits for the job is told
            if status.waits and status.waits != said and not over.is_set():
                said = status.waits
                says.line(f"  {said}. To cancel: {cancelling([status.id], place)}")

    thread = threading.Thread(target=watch, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
