"""Running totals of the record: each row is read once, however often the totals are read.

Trials, problems and revisions of winners are only ever added, so a total is what was counted before
plus what has a greater id.

Only one thread at a time may use an object.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, literal, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from tuner.store.database import Database
from tuner.store.models import DeviceRow, KernelRow, PackRow, ProblemRow, TrialRow, WinnerRow

SETTLE_S = 10.0
"""Longest time that a write transaction on PostgreSQL should take; they take milliseconds."""

PIECE = 20_000
"""Rows counted in one transaction; a tenth of a second if they come from a disk."""

MEASURED = "measured"
"""Outcome of a trial that has a time; the outcome of any other is the kind of its failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordTotals:
    """The record's totals.

    Attributes:
        trials: number by phase and outcome.
        trial_seconds: wall time they took on the device, by phase and outcome.
        records: rows by kind; `winners` are current ones.
        pack_bytes: bytes of all recorded packs.
    """

    trials: Mapping[tuple[str, str], int]
    trial_seconds: Mapping[tuple[str, str], float]
    records: Mapping[str, int]
    pack_bytes: int


class Totals:
    """The totals of one database. `settle_s` is for PostgreSQL, see `_Running.look`."""

    def __init__(self, database: Database, *, settle_s: float = SETTLE_S) -> None:
        self._database = database
        settle_s = 0.0 if database.is_sqlite else settle_s
        outcome = func.coalesce(TrialRow.failure_kind, MEASURED)
        trials = select(func.count(), func.sum(TrialRow.cost_s), TrialRow.phase, outcome)
        self._trials = _Running(trials.group_by(TrialRow.phase, outcome), TrialRow.id, settle_s)
        self._problems = _Running(select(func.count(), literal(0.0)), ProblemRow.id, settle_s)
        # A problem on a device has one first revision, and one that is current.
        firsts = select(func.count(), literal(0.0)).where(WinnerRow.revision == 1)
        self._winners = _Running(firsts, WinnerRow.id, settle_s)

    def read(self, should_stop: Callable[[], bool] = lambda: False) -> RecordTotals | None:
        """The totals now; None if `should_stop` ended it: the next call continues from there.

        Raises:
            StoreError: the database cannot be read.
        """
        for running in (self._trials, self._problems, self._winners):
            with self._database.read() as session:
                running.look(session)
            # The first reading counts everything: in pieces, so that no transaction stays open for
            # long.
            while running.behind:
                if should_stop():
                    return None
                with self._database.read() as session:
                    running.advance(session)
        small = {"devices": DeviceRow, "kernels": KernelRow, "packs": PackRow}
        with self._database.read() as session:
            records = {
                name: session.scalar(select(func.count()).select_from(table)) or 0
                for name, table in small.items()
            }
            pack_bytes = session.scalar(select(func.sum(PackRow.bytes))) or 0
        return RecordTotals(
            trials=dict(self._trials.numbers),
            trial_seconds=dict(self._trials.sums),
            records={
                **records,
                "trials": self._trials.numbers.total(),
                "problems": self._problems.numbers.total(),
                "winners": self._winners.numbers.total(),
            },
            pack_bytes=int(pack_bytes),
        )


class _Running:
    """Numbers and sums of a table's rows by group, over all rows up to some id.

    `query` gives a number, a sum, and then the columns that it groups by.
    """

    def __init__(
        self, query: Select[*tuple[Any, ...]], key: InstrumentedAttribute[int], settle_s: float
    ) -> None:
        self.numbers: Counter[Any] = Counter()
        self.sums: Counter[Any] = Counter()
        self._query = query
        self._key = key
        self._settle_s = settle_s
        self._seen: deque[tuple[float, int]] = deque()
        self._upto = 0
        self._target: int | None = None

    @property
    def behind(self) -> bool:
        return self._target is not None and self._upto < self._target

    def look(self, session: Session) -> None:
        """Read the table's newest id, and set the id to count to."""
        newest = session.scalar(select(func.max(self._key))) or 0
        at = time.monotonic()
        if self._target is None:
            self._target = newest
        # SQLite has one writer, and ids become visible in order. On PostgreSQL a transaction may
        # commit after another with greater ids, so an id counts only `SETTLE_S` after it was first
        # seen: totals are that late there, and a write that took longer is missed.
        # The target is the newest id as it was `settle_s` ago: transactions that had begun by then
        # have committed.
        self._seen.append((at, newest))
        while self._seen and at - self._seen[0][0] >= self._settle_s:
            self._target = self._seen.popleft()[1]

    def advance(self, session: Session) -> None:
        """Count the next piece."""
        end = min(self._upto + PIECE, self._target or 0)
        rows = session.execute(self._query.where(self._key > self._upto, self._key <= end))
        for number, total, *group in rows:
            self.numbers[tuple(group)] += number
            self.sums[tuple(group)] += total or 0
        self._upto = end
