"""The durable queue of tuning jobs, in the store's database.

A worker leases a job: it owns it until the lease expires, by the database's clock, and renews it
with heartbeats. Every write of a worker is fenced on its name and the attempt's number, so a worker
that was believed dead and comes back changes nothing. A job whose lease expired goes to the next
worker that leases one; the number of failed attempts is limited. Requests for the same problem,
device and effort join the job that already waits or runs. Higher priority first, then the most
time at stake (calls × expected saving of one), then first come, first served. The queue is bounded:
an order that finds no room raises and changes nothing. A job whose deadline has passed is not begun
any more.
"""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort, JobState
from tuner.errors import JobNotFound, NotRetryable
from tuner.jobs import limits
from tuner.jobs.job import (
    LONGEST_S,
    Job,
    RecordedEvent,
    add_event,
    attempts_left,
    end,
    expire,
    is_abandoned,
    is_available,
    job_of,
    lapsed,
    recording,
    turn,
)
from tuner.jobs.lease import LeasedJob
from tuner.jobs.workers import Workers
from tuner.store.audit import LOCAL, Action, record
from tuner.store.dictionary import problem_of
from tuner.store.models import IdempotencyKeyRow, JobEventRow, JobRow, ProblemRow
from tuner.store.sql import moment, now
from tuner.store.store import Store

MAX_ATTEMPTS = 3
"""Attempts of a job that may fail. A candidate that kills its own process does not kill the worker,
so even a second failure of the worker is bad luck or a bad machine."""

RETRY_DELAY_S = 5.0
"""Wait before the first retry, doubled for each further one: a service may be restarting."""

_MOST_CALLS = 10**18
"""Limit of a job's calls: any number of requests may join it; the column holds 2^63."""

_ENQUEUE_LOCK = 0x67656D6A  # requests queue up, so that two at once for one problem make one job


class Queue:
    """Jobs of one store. Threads and processes may each use their own on the same database.

    `limit` is how many jobs may wait; None for any number. `workers` are those that are alive.
    """

    def __init__(
        self,
        store: Store,
        *,
        limit: int | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> None:
        self._store = store
        self._database = store.database
        self.workers = Workers(store.database)
        self._limit = limit
        self._max_attempts = max_attempts
        self._retry_delay_s = retry_delay_s

    def enqueue(
        self,
        problem: Problem,
        *,
        effort: Effort = Effort.DEFAULT,
        device: str = "",
        priority: int = 0,
        calls: int = 0,
        saving_us: float = 0.0,
        deadline_s: float | None = None,
        ordered_by: str | None = None,
        job_limit: int | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Order a job; the job, and whether it is new.

        `calls` is how often the caller runs the problem, `saving_us` how many microseconds one
        such call is expected to get faster; after `deadline_s` seconds the caller has no use for
        the answer. A job for the same problem, device and effort that waits or runs is joined: it
        gets the higher priority, the calls of both, the newer `saving_us`, and the later deadline,
        or none if either has none. An `idempotency_key` that `ordered_by` used before gives that
        call's job unchanged, whatever it was for and however it has ended since: the caller
        compares. Only a new job needs room in the queue and counts for `ordered_by`, a key that
        may have `job_limit` of them.

        Raises:
            QueueFull, QuotaUsedUp: there is no room for a new job; nothing was changed.
        """
        with self._database.write() as session:
            self._database.lock(session, _ENQUEUE_LOCK)
            if idempotency_key is not None:
                owned = (ordered_by or "", idempotency_key)
                answered = session.get(IdempotencyKeyRow, owned)
                if answered is not None:
                    return _job(session, session.get_one(JobRow, answered.job_id)), False
            ids = self._store.dictionary.ids(session, [problem])
            # A unique column: only one job with this key can be joined.
            active_key = f"{ids[problem]}/{effort.value}/{device}"
            query = select(JobRow).where(JobRow.active_key == active_key)
            row = session.scalars(query.with_for_update()).one_or_none()
            deadline_at = None if deadline_s is None else moment(session) + deadline_s
            created = row is None
            if row is None:
                self._need_room(session, ordered_by, job_limit)
                row = self._new_row(session, priority)
                row.problem_id = ids[problem]
                row.effort = effort.value
                row.device = device
                row.active_key = active_key
                row.ordered_by = ordered_by
                row.deadline_at = deadline_at
                session.add(row)
                session.flush()
                data = {"problem": str(problem), "effort": effort.value, "device": device}
                add_event(session, row, "created", data)
            row.priority = max(row.priority, priority)
            row.calls = min(row.calls + calls, _MOST_CALLS)
            row.saving_us = saving_us
            if row.deadline_at is not None:  # None, no deadline, is the latest of all
                row.deadline_at = deadline_at and max(row.deadline_at, deadline_at)
            if idempotency_key is not None:
                session.add(
                    IdempotencyKeyRow(
                        owner=ordered_by or "",
                        key=idempotency_key,
                        job_id=row.id,
                        created_at=moment(session),
                    )
                )
            job = job_of(row, problem)
        self._store.dictionary.keep(ids)
        return job, created

    def retry(
        self,
        job_id: str,
        *,
        ordered_by: str | None = None,
        job_limit: int | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[Job, bool]:
        """Order a failed or cancelled job again; as `enqueue`.

        The new job has the old one's problem, effort, device, priority, calls and expected saving,
        but no deadline.

        Raises:
            JobNotFound: no job has this id.
            NotRetryable: it is done, or has not ended yet.
            QueueFull, QuotaUsedUp: as `enqueue`.
        """
        old = self.get(job_id)
        if old.state not in (JobState.FAILED, JobState.CANCELLED):  # final: no need to lock the row
            raise NotRetryable(
                f"job {job_id} is {old.state}; only a failed or cancelled one is tried again"
            )
        return self.enqueue(
            old.problem,
            effort=old.effort,
            device=old.device,
            priority=old.priority,
            calls=old.calls,
            saving_us=(old.expected_saving_us or 0.0) / max(old.calls, 1),
            ordered_by=ordered_by,
            job_limit=job_limit,
            idempotency_key=idempotency_key,
        )

    def pause_s(self, ordered_by: str | None = None) -> int:
        """Whole seconds after which a refused order is likely to find room: 1 … 3600.

        By the rate at which jobs, or those of one key, have ended lately.
        """
        with self._database.read() as session:
            return limits.pause_s(session, ordered_by)

    def _need_room(self, session: Session, ordered_by: str | None, job_limit: int | None) -> None:
        refusal = limits.refusal(session, self._limit, ordered_by, job_limit)
        # Jobs whose deadline has passed, but which have not ended yet, may take the room.
        if refusal is not None and _end_overdue(session):
            refusal = limits.refusal(session, self._limit, ordered_by, job_limit)
        if refusal is not None:
            raise refusal

    def _new_row(self, session: Session, priority: int) -> JobRow:
        at = moment(session)
        return JobRow(
            public_id=uuid.uuid4().hex,
            priority=priority,
            calls=0,
            saving_us=0.0,
            state=JobState.WAITING.value,
            phase="",
            done=0,
            total=0,
            cancel_requested=False,
            attempt=0,
            handed_back=0,
            max_attempts=self._max_attempts,
            available_at=at,
            created_at=at,
            last_event=0,
        )

    def get(self, job_id: str) -> Job:
        """The job as it is now.

        Raises:
            JobNotFound: no job has this id.
        """
        with self._database.read() as session:
            return _job(session, _row(session, job_id))

    def list(
        self, state: JobState | None = None, after: str | None = None, limit: int = 50
    ) -> list[Job]:
        """Jobs, newest first; `after` continues behind the job with that id.

        Raises:
            JobNotFound: no job has the id `after`.
        """
        recorded = recording(JobRow.public_id).correlate(JobRow).scalar_subquery()
        query = select(JobRow, ProblemRow, recorded).join(
            ProblemRow, ProblemRow.id == JobRow.problem_id
        )
        if state is not None:
            query = query.where(JobRow.state == state.value)
        with self._database.read() as session:
            if after is not None:
                query = query.where(JobRow.id < _row(session, after).id)
            rows = session.execute(query.order_by(JobRow.id.desc()).limit(limit)).all()
            return [job_of(row, problem_of(problem), name) for row, problem, name in rows]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        with self._database.read() as session:
            counts = {JobState(state): count for state, count in session.execute(query)}
        return {state: counts.get(state, 0) for state in JobState}

    def events(self, job_id: str, after: int = 0, limit: int = 200) -> builtins.list[RecordedEvent]:
        """The job's events with numbers above `after`, in order.

        Raises:
            JobNotFound: no job has this id.
        """
        with self._database.read() as session:
            query = select(JobEventRow).where(
                JobEventRow.job_id == _row(session, job_id).id, JobEventRow.number > after
            )
            rows = session.scalars(query.order_by(JobEventRow.number).limit(limit))
            return [
                RecordedEvent(id=row.number, job=job_id, at=row.at, kind=row.kind, data=row.data)
                for row in rows
            ]

    def cancel(self, job_id: str, *, actor: str = LOCAL) -> Job:
        """Stop a job: at once if no living worker has it, else between two candidates.

        A job that has ended stays as it is.

        Raises:
            JobNotFound: no job has this id.
        """
        with self._database.write() as session:
            row = _row(session, job_id, lock=True)
            state = JobState(row.state)
            if not state.terminal:
                if not row.cancel_requested:
                    record(session, Action.JOB_CANCELLED, job_id, actor=actor)
                row.cancel_requested = True
                row.active_key = None  # a new request is a new job, not this one
                abandoned = lapsed(row.lease_expires_at, moment(session))
                if state is JobState.WAITING or abandoned:
                    end(session, row, JobState.CANCELLED, {})
            return _job(session, row)

    def lease(self, owner: str, devices: Sequence[str], ttl_s: float = 60.0) -> LeasedJob | None:
        """Lease the next job for `ttl_s` seconds; None if no job is due.

        Jobs whose owner has stopped renewing the lease are taken over, or ended if they have used
        up their attempts or were to be cancelled. Jobs whose deadline has passed are ended,
        whatever device they are for.

        Args:
            owner: unique among all workers, ever: host, process and a random part.
            devices: names the worker answers to; jobs for any device are taken as well.
            ttl_s: time after which a worker that is silent counts as dead; 900 at most.

        Raises:
            ValueError: a longer lease.
        """
        if ttl_s > LONGEST_S:
            raise ValueError(f"a lease of {ttl_s:g} s is longer than {LONGEST_S:g} s")
        due = self.takes(devices)
        query = select(JobRow).where(due).order_by(*turn()).limit(1)
        with self._database.read() as session:  # polling an empty queue must not block writers
            work = select(JobRow.id).where(or_(due, _is_overdue())).limit(1)
            if session.scalar(work) is None:
                return None
        with self._database.write() as session:
            _end_overdue(session)
            while True:
                # Jobs whose rows are locked are being leased or written by others.
                row = session.scalars(query.with_for_update(skip_locked=True)).first()
                if row is None:
                    return None
                if row.cancel_requested:
                    end(session, row, JobState.CANCELLED, {})
                elif attempts_left(row) <= 0:
                    end(session, row, JobState.FAILED, {"error": _given_up(row)})
                else:
                    break
                session.flush()
            at = moment(session)
            row.state = JobState.RUNNING.value
            row.owner = owner
            row.attempt += 1
            row.lease_expires_at = at + ttl_s
            row.started_at = row.started_at or at
            row.error = None
            add_event(session, row, "started", {"attempt": row.attempt, "owner": owner})
            return LeasedJob(
                self._database,
                _job(session, row),
                row_id=row.id,
                left_s=None if row.deadline_at is None else row.deadline_at - at,
                owner=owner,
                ttl_s=ttl_s,
                retry_delay_s=self._retry_delay_s,
            )

    def takes(self, devices: Sequence[str]) -> ColumnElement[bool]:
        """Of jobs: a worker that answers to these names may take it now."""
        return and_(or_(is_available(), is_abandoned()), JobRow.device.in_(["", *devices]))


def _is_overdue() -> ColumnElement[bool]:
    """Of jobs that no living worker has: the deadline has passed."""
    return and_(
        JobRow.deadline_at <= now(),
        or_(JobRow.state == JobState.WAITING.value, is_abandoned()),
    )


def _end_overdue(session: Session) -> int:
    """End the jobs whose deadline has passed; how many."""
    query = select(JobRow).where(_is_overdue()).with_for_update(skip_locked=True)
    rows = session.scalars(query).all()
    for row in rows:
        expire(session, row)
    session.flush()
    return len(rows)


def _given_up(row: JobRow) -> str:
    return (
        f"gave up after {row.max_attempts} attempts: the last worker, {row.owner}, stopped "
        "answering. Its log says why; trials so far are kept, so tuning again continues from them"
    )


def _row(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    query = select(JobRow).where(JobRow.public_id == job_id)
    row = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise JobNotFound(f"there is no job {job_id}")
    return row


def _job(session: Session, row: JobRow) -> Job:
    problem = problem_of(session.get_one(ProblemRow, row.problem_id))
    return job_of(row, problem, session.scalar(recording(row.public_id)))
