"""A tuning job as the rest of the program sees it: plain data, a moment's view of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A tuning job.

    Attributes:
        device: slug or name of the device it is for; "" means any.
        calls: how often its callers run the problem, all requests together; 0 if none has said.
        expected_saving_us: microseconds that tuning is expected to save in all these calls; None
            while there are none.
        phase, done, total, best_us, best: how far it is; `best` is a candidate's key.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        attempt: how many times it was leased.
        max_attempts: how many of those may go wrong.
        created_at, started_at, finished_at: seconds since the epoch; `started_at` is that of the
            first attempt.
        ordered_by: name of the API key that ordered it; None where none was asked for.
        deadline_at: seconds since the epoch after which nobody needs it; None for never.
    """

    id: str
    problem: Problem
    effort: Effort
    device: str
    priority: int
    calls: int
    expected_saving_us: float | None
    state: JobState
    phase: str
    done: int
    total: int
    best_us: float | None
    best: str | None
    error: str | None
    attempt: int
    max_attempts: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    cancel_requested: bool
    winner_revision: int | None
    ordered_by: str | None = None
    deadline_at: float | None = None
    recorded: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvent:
    """Something that happened to a job.

    Attributes:
        id: 1, 2, 3 … within the job, without gaps: a reader resumes after the last it has seen.
        at: seconds since the epoch.
        kind: created, started, progress, trial, built, winner, requeued; finished, failed and
            cancelled are each a job's last event.
    """

    id: int
    job: str
    at: float
    kind: str
    data: dict[str, Any]
