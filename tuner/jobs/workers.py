"""Which workers live: who reported lately, or renews the lease of a job.

A worker reports that it is there when it begins and every `REPORT_EVERY_S` while it has no job;
with one, its lease says so. One that ends in order takes its report back, one that is killed falls
silent. Times are the database's, so that machines whose clocks differ agree.
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
"""A worker that has not reported for so long counts as gone: one report may be late."""

FORGOTTEN_S = 86_400.0
"""A report that old is deleted by the next worker that begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LivingWorker:
    """A worker that lives.

    Attributes:
        owner: its name, `host:process:random`.
        devices: names that it answers to; empty where it has not said.
        job: id of the job that it works on.
    """

    owner: str
    devices: tuple[str, ...]
    job: str | None

    @property
    def host(self) -> str:
        """The machine it runs on."""
        return self.owner.partition(":")[0]

    def takes(self, job: Job) -> bool:
        """Whether it would take that job, once it has no other."""
        return not job.device or job.device in self.devices


def taker(workers: Iterable[LivingWorker], job: Job) -> LivingWorker | None:
    """A living worker that takes the job, an idle one if there is one; None where nobody does."""
    able = [worker for worker in workers if worker.takes(job)]
    return min(able, key=lambda worker: worker.job is not None, default=None)


class Workers:
    """The reports in one database. Threads and processes may each use their own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, owner: str, devices: Sequence[str]) -> None:
        """Say that the worker lives, and what it takes jobs for."""
        with self._database.write() as session:
            said = {"devices": [*devices], "seen_at": now()}
            insert_ignore(session, WorkerRow, {"owner": owner, **said})
            session.execute(update(WorkerRow).where(WorkerRow.owner == owner).values(**said))
            session.execute(delete(WorkerRow).where(WorkerRow.seen_at < now() - FORGOTTEN_S))

    def leave(self, owner: str) -> None:
        """Say that the worker ends."""
        with self._database.write() as session:
            session.execute(delete(WorkerRow).where(WorkerRow.owner == owner))

    def alive(self) -> list[LivingWorker]:
        """All that live, by name."""
        working = select(JobRow.owner, JobRow.public_id).where(is_leased(), ~is_abandoned())
        with self._database.read() as session:
            jobs = {owner: job for owner, job in session.execute(working) if owner is not None}
            lately = WorkerRow.seen_at.between(now() - SILENT_S, now() + SILENT_S)
            reported = session.execute(
                select(WorkerRow.owner, WorkerRow.devices).where(
                    or_(lately, WorkerRow.owner.in_(jobs))
                )
            )
            devices = {owner: tuple(said) for owner, said in reported}
        return [
            LivingWorker(owner=owner, devices=devices.get(owner, ()), job=jobs.get(owner))
            for owner in sorted({*jobs, *devices})
        ]
