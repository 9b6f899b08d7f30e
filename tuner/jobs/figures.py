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
from dataclasses import dataclass

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


class Watch:
    """Follows the jobs of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followed: dict[int, _Followed] = {}
        self._newest: int | None = None
        self._ended: Counter[str] = Counter()
        self._phases: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._kernels: Counter[str] = Counter()
        self._compile_s = 0.0

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
                over = select(JobRow.state, func.count()).where(JobRow.state.in_(_ENDS.values()))
                for state, number in session.execute(over.group_by(JobRow.state)):
                    self._ended[state] = number
            rows = session.execute(alive).all()
            self._follow(session, {row.id: row.last_event for row in rows})
        states = Counter(row.state for row in rows)
        waiting = [row.created_at for row in rows if row.state == JobState.WAITING.value]
        leases = [row.lease_expires_at for row in rows if row.state == JobState.RUNNING.value]
        return JobFigures(
            states={state: states[state] for state in _ALIVE},
            oldest_waiting_s=max(0.0, at - min(waiting, default=at)),
            abandoned=sum(lapsed(lease, at) for lease in leases),
            ended={state: self._ended[state] for state in _ENDS.values()},
            phase_seconds=dict(self._phases),
            busy_seconds=dict(self._busy),
            kernels={how: self._kernels[how] for how in _HOW},
            compile_seconds=self._compile_s,
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
                new = (JobEventRow.job_id == job, JobEventRow.number > followed.number)
                query = select(JobEventRow).where(*new).order_by(JobEventRow.number)
                self._add(followed, session.scalars(query).all())
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
                        self._phases[WAITING] += spent
                    job.phase, job.host = "", str(event.data["owner"]).partition(":")[0]
                case "progress":
                    reported = str(event.data["phase"])
                    # Finals report when they begin, so the time until the next report is theirs.
                    phase = "finals" if job.phase == "finals" else reported
                    self._phases[phase] += spent
                    if phase in _MEASURING:
                        self._busy[job.host] += spent
                    job.phase = reported
                case "built":
                    self._kernels.update({how: event.data[how] for how in _HOW})
                    self._compile_s += event.data["compile_s"]
                case "created" | "requeued":
                    job.phase = WAITING
                case "finished" | "failed" | "cancelled":
                    self._ended[_ENDS[event.kind]] += 1
            job.number, job.at = event.number, event.at
