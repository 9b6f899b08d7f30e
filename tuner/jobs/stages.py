"""Jobs in two stages: one worker compiles their kernels, another one measures them.

The stages need no tables or columns of their own. A job's phase says which stage is next: if it is
`TO_COMPILE` or empty, the compilers'; else the GPUs'. A worker of one stage leases a job as every
worker does, and hands it back for the other stage, with notes in the event: a compiling worker
which packs it built, a measuring one which kernels it lacks. A worker without a stage takes all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, func, select, update

from gemmsmith.core.tuning import JobState
from tuner.jobs.job import is_abandoned
from tuner.jobs.lease import LeasedJob
from tuner.jobs.queue import Queue
from tuner.store.models import JobEventRow, JobRow
from tuner.store.sql import now
from tuner.store.store import Store

TO_COMPILE = "compile"
COMPILED = "compiled"

_WANTED = "wanted"
_PACKS = "packs"
_FAILURES = "failures"


class Stage(StrEnum):
    """What a worker does with a job."""

    COMPILE = "compile"  # builds the kernels that its tuning run begins with, or lacks
    MEASURE = "measure"  # tunes it, as far as its kernels are built


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """Notes of a job's earlier workers for the next one.

    Attributes:
        wanted: names of the kernels that the last run on a GPU lacked.
        packs: hashes of the packs that were built for the job, in order.
        failures: why kernels could not be built, by name.
        rounds: how often a GPU handed the job back because it lacked kernels.
    """

    wanted: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()
    failures: Mapping[str, str]
    rounds: int = 0


class StagedQueue(Queue):
    """The queue as workers of one stage see it; None for workers without a stage."""

    def __init__(self, store: Store, stage: Stage | None) -> None:
        super().__init__(store)
        self._stage = stage

    def takes(self, devices: Sequence[str]) -> ColumnElement[bool]:
        due = super().takes(devices)
        compiled_first = JobRow.phase.in_(["", TO_COMPILE])
        match self._stage:
            case Stage.COMPILE:
                return and_(due, compiled_first)
            case Stage.MEASURE:
                return and_(due, ~compiled_first)
            case None:
                return due

    def due(self, devices: Sequence[str]) -> int:
        """How many jobs a worker of the stage that answers to these names could take now."""
        with self._database.read() as session:
            return session.scalar(select(func.count()).where(self.takes(devices))) or 0

    def lapse(self, owners: Collection[str]) -> int:
        """End the leases of workers that are known to be dead; how many jobs they had.

        Those jobs are taken over as if their leases had expired. If such a worker is alive after
        all, its next write renews the lease, or fails because another worker has the job.
        """
        if not owners:
            return 0
        theirs = and_(JobRow.state == JobState.RUNNING.value, JobRow.owner.in_(owners))
        with self._database.write() as session:
            query = select(JobRow.id).where(theirs, ~is_abandoned()).with_for_update()
            jobs = session.scalars(query).all()
            session.execute(
                update(JobRow).where(JobRow.id.in_(jobs)).values(lease_expires_at=now() - 1)
            )
            return len(jobs)

    def notes(self, job_id: str) -> Notes:
        query = (
            select(JobEventRow.data)
            .join(JobRow, JobRow.id == JobEventRow.job_id)
            .where(JobRow.public_id == job_id, JobEventRow.kind == "requeued")
            .order_by(JobEventRow.number)
        )
        with self._database.read() as session:
            events = session.scalars(query).all()
        requests = [event[_WANTED] for event in events if event.get(_WANTED)]
        return Notes(
            wanted=tuple(requests[-1]) if requests else (),
            packs=tuple(dict.fromkeys(pack for event in events for pack in event.get(_PACKS, ()))),
            failures={
                name: reason
                for event in events
                for name, reason in event.get(_FAILURES, {}).items()
            },
            rounds=len(requests),
        )


def hand_to_compilers(leased: LeasedJob, wanted: Sequence[str]) -> None:
    """Hand a job back because a GPU lacks these kernels.

    Raises:
        LeaseLost: as `LeasedJob.release`.
    """
    notes: dict[str, Any] = {_WANTED: list(wanted)}
    leased.release("kernels are to be compiled", phase=TO_COMPILE, notes=notes)


def hand_to_gpus(leased: LeasedJob, packs: Sequence[str], failures: Mapping[str, str]) -> None:
    """Hand a job back because all its kernels are compiled, or cannot be.

    Raises:
        LeaseLost: as `LeasedJob.release`.
    """
    notes: dict[str, Any] = {_PACKS: list(packs), _FAILURES: dict(failures)}
    leased.release("its kernels are compiled", phase=COMPILED, notes=notes)
