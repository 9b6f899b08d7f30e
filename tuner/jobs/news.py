"""The events of many jobs, read together in two queries, however many jobs are followed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import and_, or_, select

from tuner.jobs.job import RecordedEvent
from tuner.store.database import Database
from tuner.store.models import JobEventRow, JobRow

_JOBS_AT_ONCE = 100
"""In one query: SQLite takes an expression of 1,000 levels, PostgreSQL plans long ones slowly."""


class News:
    """Reads of new events."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def newest(self, jobs: Collection[str]) -> dict[str, int]:
        """The number of the newest event of each of these jobs; unknown jobs are left out."""
        query = select(JobRow.public_id, JobRow.last_event).where(JobRow.public_id.in_(jobs))
        with self._database.glance() as connection:
            return {row.public_id: row.last_event for row in connection.execute(query)}

    def since(self, after: Mapping[str, int]) -> list[RecordedEvent]:
        """The events of these jobs with higher numbers than in `after`, each job's in order."""
        jobs, events = list(after), []
        with self._database.glance() as connection:
            for start in range(0, len(jobs), _JOBS_AT_ONCE):
                new = or_(
                    *(
                        and_(JobRow.public_id == job, JobEventRow.number > after[job])
                        for job in jobs[start : start + _JOBS_AT_ONCE]
                    )
                )
                query = (
                    select(
                        JobEventRow.number,
                        JobRow.public_id,
                        JobEventRow.at,
                        JobEventRow.kind,
                        JobEventRow.data,
                    )
                    .join(JobRow, JobRow.id == JobEventRow.job_id)
                    .where(new)
                    .order_by(JobRow.id, JobEventRow.number)
                )
                events += [
                    RecordedEvent(id=number, job=job, at=at, kind=kind, data=data)
                    for number, job, at, kind, data in connection.execute(query)
                ]
        return events
