"""The effort of a tuning job, and its state."""

from __future__ import annotations

from enum import StrEnum


class Effort(StrEnum):
    """How many candidates a tuning run may measure."""

    QUICK = "quick"  # about a dozen trials, for a first good answer
    DEFAULT = "default"  # the candidates that the cost model expects to be fast
    EXHAUSTIVE = "exhaustive"  # every candidate of the curated (core) space
    RECHECK = "recheck"  # finals only, of the winner and the candidates that came close


class JobState(StrEnum):
    """The state of a job. The last three are final."""

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a worker holds it
    DONE = "done"  # a winner was promoted
    FAILED = "failed"  # given up; `error` says why
    CANCELLED = "cancelled"  # stopped at a user's request

    @property
    def terminal(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
