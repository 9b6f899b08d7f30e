"""How jobs ended and where their time went, from the database, to which all workers write.

Numbers of jobs are those at the time of reading. Times are added up from the events, which every
worker writes and which survive it: each reading takes only the new events. Times count from the
first reading on, and for jobs that run then from their beginning; the numbers of ended jobs count
from the beginning of the database.

A tuning run is one thread: it waits for compilers or it measures. So the time that ends with a
report of progress was spent in the report's phase, except that finals report when they begin. Time
in which no worker had the job (its worker was dead) is not counted. Only one thread at a time may
use an object.
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
    """The queue now, and the work that was done.

    Attributes:
        states: jobs by state.
        oldest_waiting_s: seconds since the oldest waiting job was ordered; 0 if no job waits.
        abandoned: running jobs whose worker has stopped renewing its lease.
        ended: all jobs that ever ended, by final state.
        phase_seconds: wall time by phase, all jobs together.
        busy_seconds: the part of it in which a device measured, by the worker's host.
        kernels: how many kernels were found (built before), compiled, or failed to compile.
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
    """A job that has not ended: its newest event that was read, and what that event left behind."""

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
        """The present figures.

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
        """Read the new events of jobs that have not ended, or had not at the last reading.

        `alive` has the ids of the former, with the number of their newest event.
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
            # The time since the event before; clocks may have been set back between both.
            spent = max(0.0, event.at - job.at) if job.at else 0.0
            match event.kind:
                case "started":
                    if job.phase == WAITING:
                        self._sums.phases[WAITING] += spent
                    job.phase, job.host = "", str(event.data["owner"]).partition(":")[0]
                case "progress":
                    reported = str(event.data["phase"])
                    # Finals report when they begin, so the time until the next report is theirs.
                    phase = "finals" if job.phase == "finals" else reported
                    self._sums.phases[phase] += spent
                    if phase in _MEASURING:
                        self._sums.busy[job.host] += spent
                    job.phase = reported
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
