"""One problem's history of winners on a device model, and what people choose to serve from it.

A revision that is pinned stays current whatever is promoted, imported or measured again, until it
is unpinned. Every choice is in the audit, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from gemmsmith.answers.history import Origin
from gemmsmith.core.problem import Problem
from tuner.errors import NoSuchRevision, NoSuchWinner, NothingToUndo
from tuner.store.audit import LOCAL, Action
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary
from tuner.store.models import ProblemRow, WinnerRow
from tuner.store.winners import (
    PROMOTION_LOCK,
    RANK,
    Winners,
    history_of,
    make_current,
    record_change,
)
from tuner.trial import Winner


@dataclass(frozen=True, kw_only=True, slots=True)
class WinnerRevision:
    """A winner in the history of its problem; `current` is the one that is served."""

    winner: Winner
    origin: Origin
    current: bool


class Revisions:
    """The table of winners, seen as histories."""

    def __init__(self, database: Database, dictionary: Dictionary, winners: Winners) -> None:
        self._database = database
        self._dictionary = dictionary
        self._winners = winners

    def find(
        self, problem: Problem, device: str, *, before: int | None = None, limit: int | None = None
    ) -> list[WinnerRevision]:
        """Revisions, newest first; with `before` only those older than that one."""
        with self._database.read() as session:
            query = history_of(*self._ids(session, problem, device)).limit(limit)
            if before is not None:
                query = query.where(WinnerRow.revision < before)
            rows = [*session.scalars(query)]
            winners = self._winners.read(session, [(row, problem) for row in rows])
            return [_revision(row, winner) for row, winner in zip(rows, winners, strict=True)]

    def pages(self, size: int = 1000) -> Iterator[list[Winner]]:
        """Every revision of every history, oldest first and `size` at a time."""
        after = 0
        while True:
            query = select(WinnerRow, ProblemRow).join(
                ProblemRow, ProblemRow.id == WinnerRow.problem_id
            )
            query = query.where(WinnerRow.id > after).order_by(WinnerRow.id).limit(size)
            with self._database.read() as session:
                rows = session.execute(query).all()
                if not rows:
                    return
                winners = self._winners.read(session, rows)
            yield winners
            after = rows[-1][0].id

    def pin(
        self, problem: Problem, device: str, revision: int, *, actor: str = LOCAL
    ) -> WinnerRevision:
        """Serve that revision, whatever is promoted later, until it is unpinned.

        Raises:
            NoSuchWinner: the problem has no winner on this device.
            NoSuchRevision: the message lists those that exist, or why this one is not served.
        """
        with self._database.write() as session:
            history = self._locked(session, problem, device)
            known = {row.revision: row for row in history}
            if revision not in known:
                raise NoSuchRevision(
                    f"{problem} on {device} has no revision {revision}; it has "
                    f"{', '.join(map(str, sorted(known)))}"
                )
            if not _may_be_served(known[revision]):
                raise NoSuchRevision(
                    f"revision {revision} of {problem} on {device} is not served: it has no "
                    "trusted signature. Trust its key and import it again, or tune it"
                )
            return self._serve(session, problem, history, known[revision], Action.PINNED, actor)

    def unpin(self, problem: Problem, device: str, *, actor: str = LOCAL) -> WinnerRevision:
        """Serve the newest revision of the best origin again.

        Raises:
            NoSuchWinner: the problem has no winner on this device.
            NothingToUndo: none of its revisions is pinned.
        """
        with self._database.write() as session:
            history = self._locked(session, problem, device)
            if not any(row.pinned for row in history):
                raise NothingToUndo(f"no revision of {problem} on {device} is pinned")
            served = [row for row in history if _may_be_served(row)]
            row = max(served, key=lambda row: (RANK[Origin(row.origin)], row.revision))
            return self._serve(session, problem, history, row, Action.UNPINNED, actor)

    def roll_back(self, problem: Problem, device: str, *, actor: str = LOCAL) -> WinnerRevision:
        """Serve, pinned, the revision that was current before the present one.

        Rolling back once more therefore undoes it.

        Raises:
            NoSuchWinner: the problem has no winner on this device.
            NothingToUndo: no other revision was ever current.
        """
        with self._database.write() as session:
            history = self._locked(session, problem, device)
            earlier = [row for row in history if row.sequence > 0 and not row.is_current]
            if not earlier:
                raise NothingToUndo(
                    f"no other revision of {problem} on {device} was served before; its history "
                    "lists those that can be pinned"
                )
            row = max(earlier, key=lambda row: row.sequence)
            return self._serve(session, problem, history, row, Action.ROLLED_BACK, actor)

    def _ids(self, session: Session, problem: Problem, device: str) -> tuple[int, int]:
        # No row has the id 0: an unknown problem or device has an empty history.
        problem_id = self._dictionary.problem_id(session, problem)
        device_id = self._dictionary.device_id(session, device)
        return problem_id or 0, device_id or 0

    def _locked(self, session: Session, problem: Problem, device: str) -> list[WinnerRow]:
        """The history, newest first; no other writer changes it until the transaction ends."""
        self._database.lock(session, PROMOTION_LOCK)
        history = [*session.scalars(history_of(*self._ids(session, problem, device)))]
        if not history:
            raise NoSuchWinner(f"no winner is known for {problem} on {device}; tune it first")
        return history

    def _serve(
        self,
        session: Session,
        problem: Problem,
        history: list[WinnerRow],
        row: WinnerRow,
        action: Action,
        actor: str,
    ) -> WinnerRevision:
        current = next((other for other in history if other.is_current), None)
        for other in history:
            other.pinned = False
        row.pinned = action is not Action.UNPINNED
        # Also if it is current already: its answer, which says whether it is pinned, changes.
        make_current(session, row, current)
        (winner,) = self._winners.read(session, [(row, problem)])
        record_change(session, action, winner, row, current, actor=actor)
        return _revision(row, winner)


def _may_be_served(row: WinnerRow) -> bool:
    # An unsigned revision may be served only if it was before: an import had allowed it.
    return row.origin != Origin.UNSIGNED or row.sequence > 0


def _revision(row: WinnerRow, winner: Winner) -> WinnerRevision:
    return WinnerRevision(winner=winner, origin=Origin(row.origin), current=row.is_current)
