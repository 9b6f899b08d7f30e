"""How hard a tuning job tries, and where it is in its life."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """How many candidates a tuning run may measure."""

    QUICK = "quick"  # a first good answer: about a dozen trials
    DEFAULT = "default"  # what the cost model thinks worth compiling and measuring
    EXHAUSTIVE = "exhaustive"  # every candidate of the curated (core) space
    RECHECK = "recheck"  # the winner and the few that came near it, in the finals only


class JobState(StrEnum):
    """Where a job stands. The last three are final."""

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a worker holds it
    DONE = "done"  # a winner was promoted
    FAILED = "failed"  # given up; `error` says why
    CANCELLED = "cancelled"  # stopped because somebody asked

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
