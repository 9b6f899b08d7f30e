"""Trials: durable when `add` returns, and kept once however often they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, select
from sqlalchemy.orm import Session

from gemmsmith.answers.answer import Conditions, Correctness, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Layout, Problem
from tuner.store.codec import from_json, from_json_or_none, to_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary, Entry, problem_of
from tuner.store.models import TRIAL_KEY, ProblemRow, TrialRow
from tuner.store.sql import equal, insert_new, now
from tuner.trial import Failure, FailureKind, Phase, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTrial:
    """A trial with its place in the record. `created_at` is in seconds since the epoch."""

    id: int
    created_at: float
    trial: Trial


MOST = 5_000
"""Trials drawn at most: an exhaustive run of one problem has some 2,000."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A trial as the pages draw it: what was tried when, and what it took.

    Attributes:
        at: seconds since the epoch when it was recorded.
        median_us: microseconds per launch; None if it failed.
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


class Trials:
    """The table of trials. A trial's identity is (problem, device, candidate, phase,
    environment, job); the first one added under an identity is kept.
    """

    def __init__(self, database: Database, dictionary: Dictionary) -> None:
        self._database = database
        self._dictionary = dictionary

    def add(self, trials: Sequence[Trial]) -> list[int]:
        """Add all or none, durably; the ids, in the same order, of the rows that now hold them."""
        values = [_values(trial) for trial in trials]  # before others wait for the transaction
        with self._database.write() as session:
            ids = self._dictionary.ids(
                session,
                (
                    entry
                    for trial in trials
                    for entry in (
                        trial.problem,
                        trial.device,
                        trial.environment,
                        trial.candidate.kernel,
                    )
                ),
            )
            identities = [_identity(ids, trial) for trial in trials]
            added = _add(session, identities, values)
        self._dictionary.keep(ids)
        return added

    def find(
        self,
        *,
        problem: Problem | None = None,
        device: str | None = None,
        dtype: str | None = None,
        layout: Layout | None = None,
        phase: Phase | None = None,
        job: str | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> list[StoredTrial]:
        """Trials that meet every condition, oldest first.

        `device` is a device model's slug. `after` is the cursor of the next page: only trials
        later than the one with this id.
        """
        query = select(TrialRow, ProblemRow).join(ProblemRow, ProblemRow.id == TrialRow.problem_id)
        with self._database.read() as session:
            # No row has the id 0: an unknown problem or device has no trials.
            ids = self._dictionary
            problem_id = None if problem is None else ids.problem_id(session, problem) or 0
            device_id = None if device is None else ids.device_id(session, device) or 0
            conditions = (
                (TrialRow.problem_id, problem_id),
                (TrialRow.device_id, device_id),
                (ProblemRow.dtype, dtype),
                (ProblemRow.layout, layout),
                (TrialRow.phase, phase),
                (TrialRow.job, job),
            )
            query = query.where(*equal(*conditions))
            if after is not None:
                query = query.where(TrialRow.id > after)
            rows = session.execute(query.order_by(TrialRow.id).limit(limit)).all()
            return self._stored(session, rows)

    def of_ids(self, ids: Sequence[int]) -> tuple[StoredTrial, ...]:
        """The trials with these ids, in this order."""
        query = select(TrialRow, ProblemRow).join(ProblemRow, ProblemRow.id == TrialRow.problem_id)
        with self._database.read() as session:
            rows = session.execute(query.where(TrialRow.id.in_(ids))).all()
            trials = {stored.id: stored for stored in self._stored(session, rows)}
        return tuple(trials[row_id] for row_id in ids)

    def tried_on(self, problem: Problem, device: str) -> tuple[Tried, ...]:
        """The newest `MOST` trials of the problem on that device model, oldest first.

        Rows of a few columns each, so that thousands of candidates are read in milliseconds.
        """
        with self._database.read() as session:
            problem_id = self._dictionary.problem_id(session, problem)
            device_id = self._dictionary.device_id(session, device)
        return self._tried(TrialRow.problem_id == problem_id, TrialRow.device_id == device_id)

    def tried_for(self, job: str) -> tuple[Tried, ...]:
        """As `tried_on`, of a job."""
        return self._tried(TrialRow.job == job)

    def _tried(self, *conditions: ColumnElement[bool]) -> tuple[Tried, ...]:
        query = BRIEFLY.where(*conditions).order_by(TrialRow.id.desc()).limit(MOST)
        with self._database.read() as session:
            rows = session.execute(query).all()
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

    def _stored(
        self, session: Session, rows: Sequence[Row[TrialRow, ProblemRow]]
    ) -> list[StoredTrial]:
        kernels = self._dictionary.kernels(session, (row[0].kernel_id for row in rows))
        return [
            StoredTrial(
                id=trial.id,
                created_at=trial.created_at,
                trial=Trial(
                    problem=problem_of(problem),
                    candidate=Candidate(
                        kernel=kernels[trial.kernel_id], launch=from_json(Launch, trial.launch)
                    ),
                    device=self._dictionary.device(session, trial.device_id),
                    environment=self._dictionary.environment(session, trial.environment_id),
                    phase=Phase(trial.phase),
                    statistics=_statistics(trial),
                    samples_us=tuple(trial.samples_us),
                    failure=_failure(trial),
                    correctness=from_json_or_none(Correctness, trial.correctness),
                    conditions=from_json_or_none(Conditions, trial.conditions),
                    workspace_bytes=trial.workspace_bytes,
                    cost_s=trial.cost_s,
                    replayed=trial.replayed,
                    job=trial.job or None,
                ),
            )
            for trial, problem in rows
        ]


def _add(
    session: Session, identities: Sequence[dict[str, Any]], rest: Sequence[dict[str, Any]]
) -> list[int]:
    """Ids of the rows with these identities; new rows get the `rest`."""
    rows = [{**identity, **values} for identity, values in zip(identities, rest, strict=True)]
    if not rows:
        return []
    new = insert_new(session, TrialRow, rows, TRIAL_KEY, created_at=now())
    added: dict[tuple[Any, ...], int] = {tuple(row[1:]): row[0] for row in new}
    return [
        added.get(tuple(identity.values()))
        or session.scalars(select(TrialRow.id).filter_by(**identity)).one()
        for identity in identities
    ]


def _identity(ids: Mapping[Entry, int], trial: Trial) -> dict[str, Any]:
    values = (
        ids[trial.problem],
        ids[trial.device],
        ids[trial.candidate.kernel],
        trial.candidate.launch.key,
        trial.phase.value,
        ids[trial.environment],
        trial.job or "",
    )
    return dict(zip(TRIAL_KEY, values, strict=True))


def _values(trial: Trial) -> dict[str, Any]:
    """All columns except those of the identity and the time."""
    statistics = trial.statistics
    failure = trial.failure
    return {
        "launch": to_json(trial.candidate.launch),
        "median_us": statistics and statistics.median_us,
        "ci_low_us": statistics and statistics.ci_low_us,
        "ci_high_us": statistics and statistics.ci_high_us,
        "samples": statistics and statistics.samples,
        "samples_us": to_json(trial.samples_us),
        "failure_kind": failure and failure.kind.value,
        "failure_message": failure and failure.message,
        "correctness": trial.correctness and to_json(trial.correctness),
        "conditions": trial.conditions and to_json(trial.conditions),
        "workspace_bytes": trial.workspace_bytes,
        "cost_s": trial.cost_s,
        "replayed": trial.replayed,
    }


def _statistics(row: TrialRow) -> Statistics | None:
    if row.median_us is None or row.ci_low_us is None or row.ci_high_us is None:
        return None
    return Statistics(
        median_us=row.median_us,
        ci_low_us=row.ci_low_us,
        ci_high_us=row.ci_high_us,
        samples=row.samples or 0,
    )


def _failure(row: TrialRow) -> Failure | None:
    if row.failure_kind is None:
        return None
    return Failure(kind=FailureKind(row.failure_kind), message=row.failure_message or "")


BRIEFLY: Select[*tuple[Any, ...]] = select(
    *(TrialRow.id, TrialRow.kernel_id, TrialRow.launch_key, TrialRow.phase, TrialRow.job),
    *(TrialRow.created_at, TrialRow.median_us, TrialRow.failure_kind, TrialRow.replayed),
    TrialRow.environment_id,
)
"""Trials without what was measured beside the time: a few columns of one table."""
