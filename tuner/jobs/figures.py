"""What became of jobs and where their time went, told from the database: all workers are in it.

Numbers of jobs are of this moment. Time is followed through the events, which every worker writes
and which survive it: each reading takes only the events that are new. A job's time is known from
the first reading on, of jobs that ran then from their beginning; how jobs ended is known from ever.

A tuning run is one thread: it waits for compilers or it measures. The time that ends with a report
of progress was therefore spent on what the report is about, except that finals report when they
begin. Time in which nobody had the job (its worker was dead) belongs to nothing. One object is for
one thread at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gemmsmith.core.tuning import JobState
from tuner.jobs.job import lapsed
from tuner.store.database import Database
from tuner.store.models import JobEventRow, JobRow
from tuner.store.sql import moment

WAITING = "waiting"
"""The phase of a job that no worker has taken yet."""

_MEASURING = ("screen", "finals")
_HOW = ("found", "compiled", "failed")
_ALIVE = (JobState.WAITING.value, JobState.RUNNING.value)
_ENDS = {
    "finished": JobState.DONE.value,
    "failed": JobState.FAILED.value,
    "cancelled": JobState.CANCELLED.value,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFigures:
    """The queue now, and what was done.

    Attributes:
        states: jobs by state.
        oldest_waiting_s: seconds since the oldest waiting job was ordered; 0 where none waits.
        abandoned: running jobs whose worker has stopped renewing its lease.
        ended: jobs by final state, from ever.
        phase_seconds: wall time by phase, all jobs together.
        busy_seconds: the part of it in which a device measured, by the worker's host.
        kernels: how kernels were come by: found, compiled or failed.
        compile_seconds: wall time of all compiler runs; they overlap.
    """

    states: Mapping[str, int]
    oldest_waiting_s: float
    abandoned: int
    ended: Mapping[str, int]
    phase_seconds: Mapping[str, float]
    busy_seconds: Mapping[str, float]
    kernels: Mapping[str, int]
    compile_seconds: float


@dataclass(kw_only=True, slots=True)
class _Followed:
    """A job that is not over: its newest event that was read, and what it left the job in."""

    number: int = 0
    at: float = 0.0
    phase: str = ""
    host: str = ""


@dataclass(kw_only=True, slots=True)
class _Sums:
    ended: Counter[str] = field(default_factory=Counter)
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: Counter[str] = field(default_factory=Counter)
    compile_s: float = 0.0


class Watch:
    """Follows the jobs of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followed: dict[int, _Followed] = {}
        self._newest: int | None = None
        self._sums = _Sums()

    def read(self) -> JobFigures:
        """The figures now.

        Raises:
            StoreError: the database cannot be read.
        """
        alive = select(
            JobRow.id, JobRow.state, JobRow.last_event, JobRow.created_at, JobRow.lease_expires_at
        ).where(JobRow.state.in_(_ALIVE))
        with self._database.read() as session:
            at = moment(session)
            if self._newest is None:
                self._sums.ended.update(_over(session))
            rows = session.execute(alive).all()
            self._follow(session, {row.id: row.last_event for row in rows})
            ended = dict(self._sums.ended)
        states = Counter(row.state for row in rows)
        waiting = [row.created_at for row in rows if row.state == JobState.WAITING.value]
        leases = [row.lease_expires_at for row in rows if row.state == JobState.RUNNING.value]
        return JobFigures(
            states={state: states[state] for state in _ALIVE},
            oldest_waiting_s=max(0.0, at - min(waiting, default=at)),
            abandoned=sum(lapsed(lease, at) for lease in leases),
            ended={state: ended.get(state, 0) for state in _ENDS.values()},
            phase_seconds=dict(self._sums.phases),
            busy_seconds=dict(self._sums.busy),
            kernels={how: self._sums.kernels[how] for how in _HOW},
            compile_seconds=self._sums.compile_s,
        )

    def _follow(self, session: Session, alive: Mapping[int, int]) -> None:
        """Read the new events of jobs that are not over, and of those that were not when last seen.

        `alive` are the ids of the former, with the number of their newest event.
        """
        newest = session.scalar(select(func.max(JobRow.id))) or 0
        known = newest if self._newest is None else self._newest
        fresh = session.scalars(select(JobRow.id).where(JobRow.id > known))
        for job in {*alive, *fresh} - self._followed.keys():
            self._followed[job] = _Followed()
        for job, followed in list(self._followed.items()):
            if alive.get(job) != followed.number:
                self._add(followed, _events(session, job, followed.number))
            if job not in alive:
                del self._followed[job]
        self._newest = newest

    def _add(self, job: _Followed, events: Sequence[JobEventRow]) -> None:
        for event in events:
            spent = max(0.0, event.at - job.at) if job.at else 0.0
            match event.kind:
                case "started":
                    if job.phase == WAITING:
                        self._sums.phases[WAITING] += spent
                    job.phase, job.host = "", str(event.data["owner"]).partition(":")[0]
                case "progress":
                    said = str(event.data["phase"])
                    phase = "finals" if job.phase == "finals" else said
                    self._sums.phases[phase] += spent
                    if phase in _MEASURING:
                        self._sums.busy[job.host] += spent
                    job.phase = said
                case "built":
                    self._build(event.data)
                case "created" | "requeued":
                    job.phase = WAITING
                case "finished" | "failed" | "cancelled":
                    self._sums.ended[_ENDS[event.kind]] += 1
            job.number, job.at = event.number, event.at

    def _build(self, data: Mapping[str, Any]) -> None:
        for how in _HOW:
            self._sums.kernels[how] += data[how]
        self._sums.compile_s += data["compile_s"]


def _over(session: Session) -> dict[str, int]:
    query = select(JobRow.state, func.count()).where(JobRow.state.in_(_ENDS.values()))
    return {row.state: row[1] for row in session.execute(query.group_by(JobRow.state))}


def _events(session: Session, job: int, after: int) -> Sequence[JobEventRow]:
    query = select(JobEventRow).where(JobEventRow.job_id == job, JobEventRow.number > after)
    return session.scalars(query.order_by(JobEventRow.number)).all()
