"""Trials as the pages draw them: what was tried when, and what it took; not how it was measured.

One row of a few columns each, so that a run of thousands of candidates is read in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, select

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.models import TrialRow
from tuner.trial import Phase

MOST = 5_000
"""Trials drawn at most, the newest: an exhaustive run of one problem has some 2,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A trial in brief.

    Attributes:
        at: seconds since the epoch when it was recorded.
        median_us: microseconds per launch; None where it failed.
        failure: the kind of failure, if it failed.
        run: what trials of one run have in common: the job, and the environment's id.
    """

    kernel: AnyKernel
    launch: str
    phase: Phase
    at: float
    median_us: float | None
    failure: str | None
    replayed: bool
    run: tuple[str, int]


class TriedTrials:
    """Read models of one database. Threads may share it."""

    def __init__(self, database: Database, dictionary: Dictionary) -> None:
        self._database = database
        self._dictionary = dictionary

    def of_problem(self, problem: Problem, device: str) -> tuple[Tried, ...]:
        """The problem's trials on that device model, oldest first; the newest `MOST`."""
        with self._database.read() as session:
            problem_id = self._dictionary.problem_id(session, problem)
            device_id = self._dictionary.device_id(session, device)
        return self._read(
            _BRIEFLY.where(TrialRow.problem_id == problem_id, TrialRow.device_id == device_id)
        )

    def of_job(self, job: str) -> tuple[Tried, ...]:
        """The trials that a job made, oldest first; the newest `MOST`."""
        return self._read(_BRIEFLY.where(TrialRow.job == job))

    def _read(self, query: Select[*tuple[Any, ...]]) -> tuple[Tried, ...]:
        with self._database.read() as session:
            rows = session.execute(query.order_by(TrialRow.id.desc()).limit(MOST)).all()
            kernels = self._dictionary.kernels(session, {row.kernel_id for row in rows})
        return tuple(
            Tried(
                kernel=kernels[row.kernel_id],
                launch=row.launch_key,
                phase=Phase(row.phase),
                at=row.created_at,
                median_us=row.median_us,
                failure=row.failure_kind,
                replayed=row.replayed,
                run=(row.job, row.environment_id),
            )
            for row in reversed(rows)
        )


_BRIEFLY: Select[*tuple[Any, ...]] = select(
    TrialRow.id,
    TrialRow.kernel_id,
    TrialRow.launch_key,
    TrialRow.phase,
    TrialRow.created_at,
    TrialRow.median_us,
    TrialRow.failure_kind,
    TrialRow.replayed,
    TrialRow.job,
    TrialRow.environment_id,
)
