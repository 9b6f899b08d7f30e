"""Which workers are alive: those that reported lately, or renew the lease of a job.

A worker reports when it begins and every `REPORT_EVERY_S` while it has no job; with a job, its
lease shows that it is alive. A worker that ends in order withdraws its report, one that is killed
stops reporting. Times are the database's, so that machines whose clocks differ agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, or_, select, update

from tuner.jobs.job import Job, is_abandoned, is_leased
from tuner.store.database import Database
from tuner.store.models import JobRow, WorkerRow
from tuner.store.sql import insert_ignore, now

REPORT_EVERY_S = 20.0
"""Time between two reports of a worker without a job; each is one small write."""

SILENT_S = 3 * REPORT_EVERY_S
"""A worker that has not reported for so long counts as dead: a report may be late."""

FORGOTTEN_S = 86_400.0
"""A report that old is deleted by the next worker that reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LivingWorker:
    """A worker that is alive.

    Attributes:
        owner: its name, `host:process:random`.
        devices: names that it answers to; empty if unknown.
        job: id of the job that it works on.
    """

    owner: str
    devices: tuple[str, ...]
    job: str | None

    @property
    def host(self) -> str:
        return self.owner.partition(":")[0]

    def takes(self, job: Job) -> bool:
        return not job.device or job.device in self.devices


def taker(workers: Iterable[LivingWorker], job: Job) -> LivingWorker | None:
    """A worker that takes the job, an idle one if there is one; None if no worker takes it."""
    able = [worker for worker in workers if worker.takes(job)]
    return min(able, key=lambda worker: worker.job is not None, default=None)


class Workers:
    """The reports in one database. Threads and processes may each use their own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, owner: str, devices: Sequence[str]) -> None:
        """Report that the worker is alive, and the devices that it takes jobs for."""
        with self._database.write() as session:
            values = {"devices": [*devices], "seen_at": now()}
            insert_ignore(session, WorkerRow, {"owner": owner, **values})
            session.execute(update(WorkerRow).where(WorkerRow.owner == owner).values(**values))
            session.execute(delete(WorkerRow).where(WorkerRow.seen_at < now() - FORGOTTEN_S))

    def leave(self, owner: str) -> None:
        with self._database.write() as session:
            session.execute(delete(WorkerRow).where(WorkerRow.owner == owner))

    def alive(self) -> list[LivingWorker]:
        """All living workers, by name."""
        working = select(JobRow.owner, JobRow.public_id).where(is_leased(), ~is_abandoned())
        with self._database.read() as session:
            jobs = {owner: job for owner, job in session.execute(working) if owner is not None}
            lately = WorkerRow.seen_at.between(now() - SILENT_S, now() + SILENT_S)
            reported = session.execute(
                select(WorkerRow.owner, WorkerRow.devices).where(
                    or_(lately, WorkerRow.owner.in_(jobs))
                )
            )
            devices = {owner: tuple(names) for owner, names in reported}
        return [
            LivingWorker(owner=owner, devices=devices.get(owner, ()), job=jobs.get(owner))
            for owner in sorted({*jobs, *devices})
        ]
