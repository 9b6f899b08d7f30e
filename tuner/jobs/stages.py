"""Jobs in two stages: one worker compiles their kernels, another one measures them.

Nothing is stored but what a job's row and events have room for anyway. A job's phase says which
stage is next: `TO_COMPILE`, or none yet, is the compilers'; any other one is the GPUs'. A worker of
one stage leases a job as every worker does, and hands it back for the other stage, with notes in
the event: a compiler what it built, a GPU which kernels it lacks. A worker of no stage takes all.
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

    COMPILE = "compile"  # builds the kernels that its tuning run begins with, or has asked for
    MEASURE = "measure"  # tunes it, as far as its kernels are built


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What earlier workers of a job left for the next one.

    Attributes:
        wanted: names of the kernels that the last run on a GPU lacked.
        packs: hashes of what was built for the job, in order.
        failures: why kernels could not be built, by name.
        rounds: how often a GPU handed the job back for want of kernels.
    """

    wanted: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()
    failures: Mapping[str, str]
    rounds: int = 0


class StagedQueue(Queue):
    """The queue as workers of one stage see it; of no stage: as every worker does."""

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

        Those jobs are taken over as if their leases had run out. Should such a worker be alive
        after all, its next write finds the job another's, or renews the lease.
        """
        if not owners:
            return 0
        theirs = and_(JobRow.state == JobState.RUNNING.value, JobRow.owner.in_(owners))
        with self._database.write() as session:
            query = select(JobRow.id).where(theirs, ~is_abandoned()).with_for_update()
            found = session.scalars(query).all()
            session.execute(
                update(JobRow).where(JobRow.id.in_(found)).values(lease_expires_at=now() - 1)
            )
            return len(found)

    def notes(self, job_id: str) -> Notes:
        """What earlier workers left with a job."""
        query = (
            select(JobEventRow.data)
            .join(JobRow, JobRow.id == JobEventRow.job_id)
            .where(JobRow.public_id == job_id, JobEventRow.kind == "requeued")
            .order_by(JobEventRow.number)
        )
        with self._database.read() as session:
            events = session.scalars(query).all()
        asked = [event[_WANTED] for event in events if event.get(_WANTED)]
        return Notes(
            wanted=tuple(asked[-1]) if asked else (),
            packs=tuple(dict.fromkeys(each for event in events for each in event.get(_PACKS, ()))),
            failures={
                name: reason
                for event in events
                for name, reason in event.get(_FAILURES, {}).items()
            },
            rounds=len(asked),
        )


def hand_to_compilers(leased: LeasedJob, wanted: Sequence[str]) -> None:
    """A GPU lacks these kernels: it takes another job meanwhile.

    Raises:
        LeaseLost: as `LeasedJob.release`.
    """
    notes: dict[str, Any] = {_WANTED: list(wanted)}
    leased.release("kernels are to be compiled", phase=TO_COMPILE, notes=notes)


def hand_to_gpus(leased: LeasedJob, packs: Sequence[str], failures: Mapping[str, str]) -> None:
    """All that was to be compiled is, or cannot be.

    Raises:
        LeaseLost: as `LeasedJob.release`.
    """
    notes: dict[str, Any] = {_PACKS: list(packs), _FAILURES: dict(failures)}
    leased.release("its kernels are compiled", phase=COMPILED, notes=notes)
