"""Winners of other installations, imported a file at a time: all of them or none.

Whether they can be true (`tuner.claims`) and which signatures are trusted is checked before. A
trusted winner becomes current by the rule of `tuner.store.winners`. Any other is stored as
`Origin.UNSIGNED` and is not answered, unless the caller allows it or a later file has the same
winner with a trusted signature. A winner that its history has already is not added again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, insert, select, update
from sqlalchemy.orm import Session

from gemmsmith.answers.history import Origin
from gemmsmith.core.device import DeviceModel, Environment
from gemmsmith.core.kernel import AnyKernel, Kernel
from tuner.store.codec import to_json
from tuner.store.database import Database
from tuner.store.dictionary import Dictionary, asked, asked_ids, pieces
from tuner.store.models import KernelRow, PackKernelRow, PackRow, WinnerRow
from tuner.store.winner_rows import columns, references
from tuner.store.winners import PROMOTION_LOCK, RANK, Winners, entries, next_sequence, origin_of
from tuner.trial import Winner

_SHOWN = (
    *(WinnerRow.id, WinnerRow.problem_id, WinnerRow.device_id, WinnerRow.revision),
    *(WinnerRow.sequence, WinnerRow.is_current, WinnerRow.pinned, WinnerRow.origin),
    *(WinnerRow.digest, WinnerRow.signature),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A winner that was measured elsewhere.

    Attributes:
        digest: of its statement.
        believed: whether a key that is trusted here signed it.
    """

    winner: Winner
    digest: str
    believed: bool


@dataclass(kw_only=True, slots=True)
class Taken:
    """How many of a file's winners were treated how.

    Attributes:
        added: answered from now on.
        unbelieved: stored, but not answered until a trusted key signs them.
        written: their rows are new or changed.
    """

    added: int = 0
    unbelieved: int = 0
    written: int = 0


class Imports:
    """The table of winners, as imports write to it."""

    def __init__(self, database: Database, dictionary: Dictionary, winners: Winners) -> None:
        self._database = database
        self._dictionary = dictionary
        self._winners = winners

    def settled(self, winners: Sequence[tuple[Winner, str]]) -> set[str]:
        """The digests, of winners and their digests, that need no import.

        The history has them with a trusted origin, and with a signature if the winner has one.
        """
        rows = {row.digest: row for row in self._shown([winner for winner, _ in winners])}
        return {
            digest
            for winner, digest in winners
            if (row := rows.get(digest)) is not None
            and row.origin != Origin.UNSIGNED
            and (row.signature is not None or winner.signature is None)
        }

    def misdescribed(self, kernels: Iterable[AnyKernel]) -> bool:
        with self._database.read() as session:
            return bool(self._dictionary.misdescribed(session, kernels))

    def take(
        self,
        batches: Iterable[Sequence[Foreign]],
        named: Collection[AnyKernel | DeviceModel | Environment],
        *,
        unsigned: bool,
    ) -> Taken:
        """Import all of them in one transaction, and correct the kernels' descriptions.

        `named` has the kernels, device models and environments of all winners. No two winners may
        be of one problem and device model. With `unsigned`, winners without a trusted signature
        are answered as well, until a better one comes.
        """
        taken = Taken()
        with self._database.write() as session:
            self._database.lock(session, PROMOTION_LOCK)
            # Before any problem: adding a trial writes them in this order too. No deadlock then.
            ids = self._dictionary.ids(session, named)
            self._winners.heal(session, [entry for entry in named if isinstance(entry, Kernel)])
            for batch in batches:
                _Intake(session, self._dictionary, taken, unsigned=unsigned).take(
                    batch, self._shown([foreign.winner for foreign in batch], session)
                )
        self._dictionary.keep(ids)
        return taken

    def _shown(
        self, winners: Sequence[Winner], session: Session | None = None
    ) -> Sequence[Row[Any]]:
        """Every revision of the histories of these winners' problems."""
        if session is None:
            with self._database.read() as reading:
                return self._shown(winners, reading)
        ids = asked_ids(on_sqlite=self._database.is_sqlite)
        parameters = asked(winner.problem for winner in winners)
        query = select(*_SHOWN).where(WinnerRow.problem_id.in_(ids))
        return session.execute(query, parameters).all()


class _Intake:
    """Imports winners into a session: each is examined alone, all are written together."""

    def __init__(
        self, session: Session, dictionary: Dictionary, taken: Taken, *, unsigned: bool
    ) -> None:
        self._session = session
        self._dictionary = dictionary
        self._taken = taken
        self._unsigned = unsigned
        self._sequence = next_sequence(session)
        self._replaced: list[int] = []
        self._changed: list[dict[str, Any]] = []
        self._new: list[dict[str, Any]] = []

    def take(self, batch: Sequence[Foreign], shown: Sequence[Row[Any]]) -> None:
        histories: dict[tuple[int, int], list[Row[Any]]] = defaultdict(list)
        for row in shown:
            histories[row.problem_id, row.device_id].append(row)
        named = (entry for foreign in batch for entry in entries(foreign.winner))
        ids = self._dictionary.ids(self._session, named, as_given=True)
        packs = self._packs(batch)
        for foreign in batch:
            winner = foreign.winner
            history = histories[ids[winner.problem], ids[winner.device]]
            same = next((row for row in history if row.digest == foreign.digest), None)
            if same is not None:
                self._know(foreign, same, history)
                continue
            origin = self._origin(foreign)
            # Packs are this machine's own; a winner from elsewhere is compiled here on demand. Jobs
            # too: a worker must not take a foreign job's winner for that of its own job.
            kernel = winner.candidate.kernel.name if winner.candidate else ""
            mine = replace(winner, pack=packs.get(kernel), job=None)
            revision = 1 + max((row.revision for row in history), default=0)
            values = {**columns(mine, origin, foreign.digest), **references(mine, ids)}
            self._new.append({**values, "revision": revision, **self._place(origin, history)})
        self._write()

    def _origin(self, foreign: Foreign) -> Origin:
        return origin_of(foreign.winner, Origin.IMPORTED if foreign.believed else Origin.UNSIGNED)

    def _know(self, foreign: Foreign, row: Row[Any], history: Sequence[Row[Any]]) -> None:
        """Update a revision that exists: it may be trusted from now on, or answered."""
        was = Origin(row.origin)
        origin = self._origin(foreign) if was is Origin.UNSIGNED else was
        signature = row.signature
        if signature is None and foreign.believed:
            signature = to_json(foreign.winner.signature)
        place = {"is_current": row.is_current, "sequence": row.sequence}
        # It was stored and never answered: now it may be.
        if not row.is_current and was is Origin.UNSIGNED and row.sequence == 0:
            place = self._place(origin, history)
        values = {"origin": origin.value, "signature": signature, **place}
        if any(getattr(row, name) != value for name, value in values.items()):
            self._changed.append({"id": row.id, **values})

    def _place(self, origin: Origin, history: Sequence[Row[Any]]) -> dict[str, Any]:
        """Whether a winner of that origin becomes current, and its sequence."""
        if origin is Origin.UNSIGNED and not self._unsigned:
            self._taken.unbelieved += 1
            return {"is_current": False, "sequence": 0}
        current = next((row for row in history if row.is_current), None)
        if current is not None:
            if current.pinned or RANK[origin] < RANK[Origin(current.origin)]:
                return {"is_current": False, "sequence": 0}
            self._replaced.append(current.id)
        self._taken.added += 1
        self._sequence += 1
        return {"is_current": True, "sequence": self._sequence - 1}

    def _packs(self, batch: Sequence[Foreign]) -> Mapping[str, str]:
        """The newest pack that holds each kernel of the batch that is compiled here."""
        candidates = [foreign.winner.candidate for foreign in batch]
        names = {candidate.kernel.name for candidate in candidates if candidate}
        query = (
            select(KernelRow.name, PackRow.hash)
            .join(PackKernelRow, PackKernelRow.kernel_id == KernelRow.id)
            .join(PackRow, PackRow.id == PackKernelRow.pack_id)
            .order_by(PackRow.id)
        )
        packs: dict[str, str] = {}
        for some in pieces(sorted(names)):
            rows = self._session.execute(query.where(KernelRow.name.in_(some)))
            packs |= {name: pack for name, pack in rows}  # noqa: C416 - rows are no pairs
        return packs

    def _write(self) -> None:
        self._taken.written += len(self._changed) + len(self._new)
        for some in pieces(self._replaced):  # first: a unique index forbids two current rows
            was = update(WinnerRow).where(WinnerRow.id.in_(some))
            self._session.execute(was.values(is_current=False))
        if self._changed:
            self._session.execute(update(WinnerRow), self._changed)
        if self._new:
            self._session.execute(insert(WinnerRow), self._new)
