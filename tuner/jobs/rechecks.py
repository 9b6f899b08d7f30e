"""Idle work: ordering that stale winners are measured again, and giving way to users' orders.

A re-check is an ordinary durable job of effort `recheck`, for the device model, with a priority
below that of any order: a user's order of the same job joins it and raises its priority. The only
memory is the table of jobs: no re-check of a problem is ordered while any job for it waits or runs,
and for `AGAIN_S` after a re-check of it has ended, so that one which fails is not ordered in a
loop.
"""

from __future__ import annotations

from sqlalchemy import and_, func, or_, select

from gemmsmith.core.tuning import Effort, JobState
from tuner.jobs.job import Job
from tuner.jobs.queue import Queue
from tuner.store.dictionary import problem_of
from tuner.store.models import JobRow, ProblemRow, WinnerRow
from tuner.store.sql import now
from tuner.store.store import Store

IDLE_PRIORITY = -101
"""Below the lowest that an order may have, -100."""

AGAIN_S = 86_400.0
"""A failed re-check is not repeated sooner: by then the machine may have been repaired."""

_ACTIVE = [JobState.WAITING.value, JobState.RUNNING.value]


class Rechecks:
    """Re-checks on one device model.

    Args:
        device: the device model's slug.
        name: what the user calls the device of this worker; jobs for it count as well.
    """

    def __init__(self, store: Store, queue: Queue, device: str, name: str) -> None:
        self._store = store
        self._queue = queue
        self._device = device
        self._names = ("", device, name)

    def order(self) -> Job | None:
        """Order one re-check; None if none is due.

        First the problem with most time at stake (its jobs' calls × the time of a call), then the
        one promoted first. Pinned winners are left out: a re-check would not change what is served.

        Raises:
            QueueFull: the queue has a limit, and no room for it.
            StoreError: the database cannot be used.
        """
        calls = (
            select(JobRow.problem_id, func.sum(JobRow.calls).label("calls"))
            .group_by(JobRow.problem_id)
            .subquery()
        )
        at_stake = func.coalesce(calls.c.calls * WinnerRow.median_us, 0.0)
        left_alone = select(JobRow.problem_id).where(
            or_(
                and_(JobRow.state.in_(_ACTIVE), JobRow.device.in_(self._names)),
                and_(
                    JobRow.effort == Effort.RECHECK.value,
                    JobRow.device == self._device,
                    JobRow.finished_at > now() - AGAIN_S,
                ),
            )
        )
        with self._store.database.read() as session:
            device_id = self._store.dictionary.device_id(session, self._device)
            if device_id is None:
                return None
            outdated = self._store.gpus.outdated_environments(session, device_id)
            if not outdated:
                return None  # the query below reads all winners: 1.4 s for a million
            query = (
                select(ProblemRow)
                .join(WinnerRow, WinnerRow.problem_id == ProblemRow.id)
                .outerjoin(calls, calls.c.problem_id == ProblemRow.id)
                .where(WinnerRow.is_current, WinnerRow.device_id == device_id)
                .where(WinnerRow.environment_id.in_(outdated))
                .where(~WinnerRow.replayed, ~WinnerRow.pinned)
                .where(ProblemRow.id.not_in(left_alone))
                .order_by(at_stake.desc(), WinnerRow.id)
                .limit(1)
            )
            row = session.scalar(query)
        if row is None:
            return None
        job, _ = self._queue.enqueue(
            problem_of(row), effort=Effort.RECHECK, device=self._device, priority=IDLE_PRIORITY
        )
        return job

    def outranked(self, job: Job) -> bool:
        """Whether the job is idle work, and a user has ordered one that this worker may take.

        Raises:
            StoreError: the database cannot be used.
        """
        if job.priority > IDLE_PRIORITY:
            return False
        waiting = select(JobRow.id).where(
            self._queue.takes(self._names),
            JobRow.state == JobState.WAITING.value,
            JobRow.priority > IDLE_PRIORITY,
        )
        with self._store.database.read() as session:
            if session.scalar(waiting.limit(1)) is None:
                return False
            priority = session.scalar(select(JobRow.priority).where(JobRow.public_id == job.id))
            return priority == IDLE_PRIORITY  # unless an order has joined it meanwhile
