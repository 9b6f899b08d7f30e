"""A tuning job: plain data for the rest of the program, and the changes of its row and events.

The changes are made inside the transaction of the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, SQLColumnExpression, and_, case, or_, select
from sqlalchemy.orm import Session

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from tuner.store.models import DeviceRow, JobEventRow, JobRow, TrialRow
from tuner.store.sql import moment, now


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A tuning job.

    Attributes:
        device: slug or name of the device it is for; "" means any.
        calls: how often its callers run the problem, all requests together; 0 if unknown.
        expected_saving_us: microseconds that tuning is expected to save in all these calls; None
            if `calls` is 0.
        phase, done, total, best_us, best: how far it is; `best` is a candidate's key.
        recorded: name of the GPU model whose recorded times these are; empty if a GPU measures.
        attempt: how many times it was leased.
        max_attempts: how many of those may go wrong.
        created_at, started_at, finished_at: seconds since the epoch; `started_at` is that of the
            first attempt.
        ordered_by: name of the API key that ordered it; None if keys are not in use.
        deadline_at: seconds since the epoch after which it is of no use; None for never.
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


_LAST_EVENT = {
    JobState.DONE: "finished",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}

LONGEST_S = 900.0
"""No lease and no delay lasts longer. A time further ahead was set by a clock that was set back
since: it must not keep a job from being worked on until the clock gets there again."""


def lapsed(until: float | None, at: float) -> bool:
    """Whether a lease that lasts `until` has ended at the time `at`; so has None, no lease."""
    return until is None or not at <= until <= at + LONGEST_S


def is_abandoned() -> ColumnElement[bool]:
    """Of running jobs: the lease has `lapsed`."""
    until = JobRow.lease_expires_at
    ended = or_(until < now(), until > now() + LONGEST_S)
    return and_(is_leased(), ended)


def is_leased() -> ColumnElement[bool]:
    """Of jobs: a worker has taken it, and may have stopped renewing its lease since."""
    return JobRow.state == JobState.RUNNING.value


ANSWERED = "answered"
"""The phase of a waiting job that has a first winner, and kernels to compile for a second one."""


def turn() -> tuple[ColumnElement[Any], ...]:
    """The order in which jobs are leased: within a priority, those without any answer first."""
    stake = JobRow.calls * JobRow.saving_us
    return JobRow.priority.desc(), JobRow.phase == ANSWERED, stake.desc(), JobRow.id.asc()


def is_available() -> ColumnElement[bool]:
    """Of waiting jobs: a worker may take it now."""
    since = JobRow.available_at
    due = or_(since <= now(), since > now() + LONGEST_S)
    return and_(JobRow.state == JobState.WAITING.value, due)


def add_event(session: Session, row: JobRow, kind: str, data: dict[str, Any]) -> None:
    """Append an event. The caller holds the row's lock, so numbers neither collide nor skip."""
    row.last_event += 1
    session.add(
        JobEventRow(job_id=row.id, number=row.last_event, at=moment(session), kind=kind, data=data)
    )


def end(session: Session, row: JobRow, state: JobState, data: dict[str, Any]) -> None:
    """Put the job into a final state, with its last event; it has no owner and cannot be joined."""
    row.state = state.value
    row.finished_at = moment(session)
    row.lease_expires_at = None
    row.active_key = None
    if state is JobState.FAILED:
        row.error = data["error"]
    add_event(session, row, _LAST_EVENT[state], data)


def expire(session: Session, row: JobRow) -> None:
    """End a job whose deadline has passed."""
    if row.cancel_requested:
        end(session, row, JobState.CANCELLED, {})
        return
    missed = "it had a winner; its trials are kept" if row.attempt else "a worker could begin it"
    reason = f". Its last attempt failed: {row.error}" if row.error else ""
    end(session, row, JobState.FAILED, {"error": f"its deadline passed before {missed}{reason}"})


def requeue(session: Session, row: JobRow, delay_s: float, data: dict[str, Any]) -> None:
    """Let another attempt begin, after `delay_s` (or `LONGEST_S`, if that is less)."""
    row.state = JobState.WAITING.value
    row.lease_expires_at = None
    row.available_at = moment(session) + min(delay_s, LONGEST_S)
    add_event(session, row, "requeued", data)


def attempts_left(row: JobRow) -> int:
    return row.max_attempts - (row.attempt - row.handed_back)


def recording(job: SQLColumnExpression[str] | str) -> Select[str]:
    """Name of the GPU model whose recording a job's last trial comes from; empty if measured."""
    name = case((TrialRow.replayed, DeviceRow.name), else_="")
    trials = select(name).join(DeviceRow, DeviceRow.id == TrialRow.device_id)
    return trials.where(TrialRow.job == job).order_by(TrialRow.id.desc()).limit(1)


def job_of(row: JobRow, problem: Problem, recorded: str | None = None) -> Job:
    return Job(
        id=row.public_id,
        problem=problem,
        effort=Effort(row.effort),
        device=row.device,
        priority=row.priority,
        calls=row.calls,
        expected_saving_us=row.calls * row.saving_us if row.calls else None,
        state=JobState(row.state),
        phase=row.phase,
        done=row.done,
        total=row.total,
        best_us=row.best_us,
        best=row.best,
        error=row.error,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested=row.cancel_requested,
        winner_revision=row.winner_revision,
        ordered_by=row.ordered_by,
        deadline_at=row.deadline_at,
        recorded=recorded or "",
    )
