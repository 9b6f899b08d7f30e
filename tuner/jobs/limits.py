"""How many jobs may wait or run at once, and when a next one is likely to find room.

The counts stop at the limit and read only an index (`ix_jobs_lease`, `ix_jobs_ordered_by`), so that
a check costs the same whatever else the table holds. They are made under the lock of orders: two
orders at once never take the same last place.
"""

from __future__ import annotations

import math

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from gemmsmith.core.tuning import JobState
from tuner.errors import QueueFull, QuotaUsedUp
from tuner.store.models import JobRow
from tuner.store.sql import moment

LONGEST_PAUSE_S = 3600
"""Longest pause that is recommended, also if no job has ended for so long."""

_NEWEST_JOBS = 20_000
"""Newest jobs among which the latest ends are searched; `finished_at` has no index."""

_ENDS = 20
"""Ends that the rate is computed from: enough for a mean, few enough to be recent."""


def refusal(
    session: Session, limit: int | None, ordered_by: str | None, job_limit: int | None
) -> QueueFull | QuotaUsedUp | None:
    """The error if there is no room for one more job; None if there is.

    `limit` jobs may wait, and `job_limit` of those `ordered_by` one key may wait or run; None for
    any number.
    """
    waiting = JobState.WAITING.value
    if limit is not None and _count(session, limit, JobRow.state == waiting) >= limit:
        return QueueFull(
            f"{limit} jobs are waiting, which is the limit. Nothing was requested; try again later"
        )
    if ordered_by is None or job_limit is None:
        return None
    theirs = JobRow.ordered_by == ordered_by
    active = JobRow.state.in_([waiting, JobState.RUNNING.value])
    if _count(session, job_limit, theirs, active) >= job_limit:
        return QuotaUsedUp(
            f"{job_limit} jobs of the key {ordered_by!r} are waiting or running, which is its "
            "limit. Nothing was requested; try again later"
        )
    return None


def pause_s(session: Session, ordered_by: str | None) -> int:
    """Whole seconds until a job is likely to have ended, by the rate of the latest ends.

    Of all jobs, or of those `ordered_by` one key; 1 … `LONGEST_PAUSE_S`.
    """
    at = moment(session)
    newest = session.scalar(select(func.max(JobRow.id))) or 0
    query = select(JobRow.finished_at).where(
        JobRow.id > newest - _NEWEST_JOBS, JobRow.finished_at > at - LONGEST_PAUSE_S
    )
    if ordered_by is not None:
        query = query.where(JobRow.ordered_by == ordered_by)
    ends = session.scalars(query.order_by(JobRow.finished_at.desc()).limit(_ENDS)).all()
    if not ends or ends[-1] is None:
        return LONGEST_PAUSE_S
    return min(max(1, math.ceil((at - ends[-1]) / len(ends))), LONGEST_PAUSE_S)


def _count(session: Session, at_most: int, *conditions: ColumnElement[bool]) -> int:
    rows = select(JobRow.id).where(*conditions).limit(at_most).subquery()
    return session.scalar(select(func.count()).select_from(rows)) or 0
