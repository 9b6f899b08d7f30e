"""A job that a worker has leased, and everything the worker may write about it.

Each method is one transaction that first checks the fence: the job is running, and its owner and
attempt are still ours. If not, `LeaseLost` is raised and nothing is written. Methods that write
renew the lease as well. What the worker writes elsewhere, trials and winners, stands behind the
same fence: it writes to `Store.fenced(leased.fence)`.

The job's deadline is kept on this machine's monotonic clock, and read again with every write: an
order that joins the job may have moved it. The database's clock decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from math import inf
from typing import Any, cast

from sqlalchemy import Table, select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from gemmsmith.core.tuning import JobState
from tuner.errors import LeaseLost
from tuner.jobs.job import (
    ANSWERED,
    Job,
    add_event,
    attempts_left,
    end,
    expire,
    is_available,
    requeue,
)
from tuner.store.database import Database
from tuner.store.models import JobRow
from tuner.store.sql import moment, now


class StopReason(StrEnum):
    """Why a worker should stop working on a job."""

    CANCELLED = "cancelled"  # a user cancelled it
    LOST = "lost"  # another worker owns it
    SHUTDOWN = "shutdown"  # this worker is to end
    DEADLINE = "deadline"  # the answer is of no use any more
    OUTRANKED = "outranked"  # it is idle work, and a user has ordered a job


class LeasedJob:
    """A leased job. Its worker's threads may share it.

    Methods that write raise `LeaseLost` if another worker owns the job, or it has ended.

    Attributes:
        job: the job as it was when it was leased.
        settled: whether it was completed, failed, cancelled or handed back through this object.
    """

    def __init__(
        self,
        database: Database,
        job: Job,
        *,
        row_id: int,
        left_s: float | None,
        owner: str,
        ttl_s: float,
        retry_delay_s: float,
    ) -> None:
        self.job = job
        self.owner = owner
        self.ttl_s = ttl_s
        self.settled = False
        self._database = database
        self._row_id = row_id
        self._retry_delay_s = retry_delay_s
        self._stop_reason: StopReason | None = None
        self._renew = _renewal(row_id, owner, job.attempt, ttl_s)
        self._note_deadline(left_s)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the worker should stop; None to go on."""
        if self._stop_reason is None and time.monotonic() >= self._deadline:
            self._stop_reason = StopReason.DEADLINE
        return self._stop_reason

    def should_stop(self) -> bool:
        """Whether to stop before the next candidate. Costs nothing: the heartbeat updates it."""
        return self.stop_reason is not None

    def ask_to_stop(self, reason: StopReason) -> None:
        """Make `should_stop` true. The first reason stays, unless the lease is lost.

        Takes no lock: signal handlers call this. If two reasons race, the fence decides.
        """
        if self._stop_reason is None or reason is StopReason.LOST:
            self._stop_reason = reason

    def heartbeat(self) -> bool:
        """Renew the lease; whether the job is to be cancelled."""
        with self._fenced() as (_, row):
            return row.cancel_requested

    def progress(
        self,
        phase: str,
        done: int,
        total: int,
        best_us: float | None = None,
        best: str | None = None,
        message: str = "",
        recorded: str = "",
    ) -> None:
        """Note how far the job is, in its row and as an event.

        `recorded` names the GPU model whose recorded times these are; empty if a GPU measures.
        """
        with self._fenced() as (session, row):
            row.phase, row.done, row.total = phase, done, total
            row.best_us, row.best = best_us, best
            data = {"phase": phase, "done": done, "total": total, "best_us": best_us, "best": best}
            data |= {"recorded": recorded} if recorded else {}
            add_event(session, row, "progress", {**data, "message": message})

    def event(self, kind: str, data: dict[str, Any]) -> None:
        with self._fenced() as (session, row):
            add_event(session, row, kind, data)

    def complete(self, winner_revision: int | None, winner: dict[str, Any] | None = None) -> None:
        """The job is done; `winner` is the data of the last event but one, which names it."""
        with self._fenced() as (session, row):
            # With the end, so that an attempt that dies before has no such event.
            if winner is not None:
                add_event(session, row, "winner", winner)
            row.winner_revision = winner_revision
            data = {"winner_revision": winner_revision, "best_us": row.best_us, "best": row.best}
            end(session, row, JobState.DONE, data)
        self.settled = True

    def fail(self, message: str, *, retry: bool) -> None:
        """The attempt failed; with `retry` another one follows while attempts are left."""
        with self._fenced() as (session, row):
            if row.cancel_requested:
                end(session, row, JobState.CANCELLED, {})
            elif retry and attempts_left(row) > 0:
                row.error = message
                failed = row.attempt - row.handed_back
                data = {"error": message, "attempts_left": attempts_left(row)}
                # The delay doubles with each failure: 5 s, 10 s, …
                requeue(session, row, self._retry_delay_s * 2 ** (failed - 1), data)
            else:
                end(session, row, JobState.FAILED, {"error": message})
        self.settled = True

    def cancelled(self) -> None:
        with self._fenced() as (session, row):
            end(session, row, JobState.CANCELLED, {})
        self.settled = True

    def overdue(self) -> None:
        """The job was stopped because its deadline passed: it has failed.

        If an order has moved the deadline since, it is handed back instead.
        """
        with self._fenced() as (session, row):
            if row.deadline_at is not None and row.deadline_at <= moment(session):
                expire(session, row)
            else:
                _hand_back(session, row, "its deadline was moved when it had been stopped")
        self.settled = True

    def release(
        self,
        reason: str = "handed back by a worker that ended",
        *,
        phase: str | None = None,
        notes: Mapping[str, Any] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Hand the job back for another worker to continue; the attempt does not count.

        The job waits in `phase` from now on, for `delay_s` at least. `notes` are for its next
        worker: they are in the event.
        """
        with self._fenced() as (session, row):
            row.phase = row.phase if phase is None else phase
            _hand_back(session, row, reason, delay_s, **(notes or {}))
        self.settled = True

    def put_off(self, devices: Sequence[str]) -> bool:
        """Hand the job back, which has a winner, if another one waits that has none yet.

        Not a job with a deadline: its end would come while it waits.

        Args:
            devices: names that the worker answers to.

        Returns:
            Whether it was handed back.
        """
        with self._fenced() as (session, row):
            others = select(JobRow.id).where(
                is_available(),
                JobRow.device.in_(["", *devices]),
                JobRow.phase != ANSWERED,
                JobRow.priority >= row.priority,
            )
            if row.deadline_at is not None or session.scalar(others.limit(1)) is None:
                return False
            row.phase = ANSWERED
            _hand_back(session, row, "it has a first winner: jobs without one go first")
        self.settled = True
        return True

    def fence(self, session: Session) -> None:
        """Renew the lease in a write transaction that has just begun; the job's row is locked.

        If it raises `LeaseLost`, the transaction must end without writing anything.
        """
        renewed = session.execute(self._renew).one_or_none()
        if renewed is None:
            self.ask_to_stop(StopReason.LOST)
            raise LeaseLost(
                f"job {self.job.id}, attempt {self.job.attempt}, is no longer "
                f"{self.owner}'s: it was taken over, or is over"
            )
        cancel_requested, left_s = renewed
        if cancel_requested:
            self.ask_to_stop(StopReason.CANCELLED)
        self._note_deadline(left_s)

    @contextmanager
    def _fenced(self) -> Iterator[tuple[Session, JobRow]]:
        with self._database.write() as session:
            self.fence(session)
            yield session, session.get_one(JobRow, self._row_id)

    def _note_deadline(self, left_s: float | None) -> None:
        self._deadline = inf if left_s is None else time.monotonic() + left_s


def _renewal(row_id: int, owner: str, attempt: int, ttl_s: float) -> ReturningUpdate[Any]:
    """A statement that renews the lease, unless the job has another owner or attempt by now.

    Made once for all writes of an attempt, because while it is made, other writers wait.
    """
    jobs = cast(Table, JobRow.__table__)
    ours = (
        jobs.c.id == row_id,
        jobs.c.owner == owner,
        jobs.c.attempt == attempt,
        jobs.c.state == JobState.RUNNING.value,
    )
    renew = update(jobs).where(*ours).values(lease_expires_at=now() + ttl_s)
    return renew.returning(jobs.c.cancel_requested, jobs.c.deadline_at - now())


def _hand_back(
    session: Session, row: JobRow, reason: str, delay_s: float = 0.0, **notes: Any
) -> None:
    row.handed_back += 1
    if row.cancel_requested:
        end(session, row, JobState.CANCELLED, {})
    else:
        requeue(session, row, delay_s, {"reason": reason, **notes})
