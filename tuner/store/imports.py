"""Winners of other installations, taken in by the file: all of them or none.

Whether they can be true is settled before (`tuner.claims`), and so is who is believed. A believed
winner becomes current as `tuner.store.winners` has it. Any other is kept as `Origin.UNSIGNED` and
is not answered, unless the caller says so; once a file brings the same winner with a signature that
is believed by then, it is. What a history shows already is not added again.
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
from tuner.store.dictionary import Dictionary, pieces
from tuner.store.models import KernelRow, PackKernelRow, PackRow, WinnerRow
from tuner.store.winner_rows import columns, references
from tuner.store.winners import (
    PROMOTION_LOCK,
    RANK,
    Winners,
    entries,
    next_sequence,
    origin_of,
)
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
        believed: somebody who is believed here signed it.
    """

    winner: Winner
    digest: str
    believed: bool


@dataclass(kw_only=True, slots=True)
class Taken:
    """What became of a file's winners.

    Attributes:
        added: that are answered from now on.
        unbelieved: that wait for being believed, or for being measured here.
        written: whose rows are new, or others than they were.
    """

    added: int = 0
    unbelieved: int = 0
    written: int = 0


class Imports:
    """The table of winners, for those who bring some."""

    def __init__(self, database: Database, dictionary: Dictionary, winners: Winners) -> None:
        self._database = database
        self._dictionary = dictionary
        self._winners = winners

    def settled(self, winners: Sequence[tuple[Winner, str]]) -> set[str]:
        """Of winners and their digests, the digests about which nothing is left to be done.

        That is what the history shows, believed, and with a signature if there is one here.
        """
        there = {row.digest: row for row in self._shown([winner for winner, _ in winners])}
        return {
            digest
            for winner, digest in winners
            if (row := there.get(digest)) is not None
            and row.origin != Origin.UNSIGNED
            and (row.signature is not None or winner.signature is None)
        }

    def misdescribed(self, kernels: Iterable[AnyKernel]) -> bool:
        """Whether the stored description of one of these kernels is not what its name means."""
        with self._database.read() as session:
            return bool(self._dictionary.misdescribed(session, kernels))

    def take(
        self,
        batches: Iterable[Sequence[Foreign]],
        named: Collection[AnyKernel | DeviceModel | Environment],
        *,
        unsigned: bool,
    ) -> Taken:
        """Take all of them in, in one transaction, and put the kernels' descriptions right.

        `named` is what the winners name beside their problems. No two may be of one problem and
        device model. With `unsigned`, those that nobody is believed to have signed are answered as
        well, until something better comes.
        """
        taken = Taken()
        with self._database.write() as session:
            self._database.lock(session, PROMOTION_LOCK)
            # Before any problem: whoever adds a trial writes them in this order too.
            ids = self._dictionary.ids(session, named)
            self._winners.heal(session, [each for each in named if isinstance(each, Kernel)])
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
        ids, parameters = self._dictionary.recorded(winner.problem for winner in winners)
        query = select(*_SHOWN).where(WinnerRow.problem_id.in_(ids))
        return session.execute(query, parameters).all()


class _Intake:
    """Some winners on their way in: looked at one by one, written together."""

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
            # Packs are this machine's own; a winner from elsewhere is compiled here on demand. So
            # are jobs: a worker must not take another one's for its own.
            kernel = winner.candidate.kernel.name if winner.candidate else ""
            mine = replace(winner, pack=packs.get(kernel), job=None)
            revision = 1 + max((row.revision for row in history), default=0)
            values = {**columns(mine, origin, foreign.digest), **references(mine, ids)}
            self._new.append({**values, "revision": revision, **self._place(origin, history)})
        self._write()

    def _origin(self, foreign: Foreign) -> Origin:
        return origin_of(foreign.winner, Origin.IMPORTED if foreign.believed else Origin.UNSIGNED)

    def _know(self, foreign: Foreign, row: Row[Any], history: Sequence[Row[Any]]) -> None:
        """A revision that is there may be believed from now on, or answered after all."""
        was = Origin(row.origin)
        origin = self._origin(foreign) if was is Origin.UNSIGNED else was
        signature = row.signature
        if signature is None and foreign.believed:
            signature = to_json(foreign.winner.signature)
        place = {"is_current": row.is_current, "sequence": row.sequence}
        if not row.is_current and was is Origin.UNSIGNED and row.sequence == 0:
            place = self._place(origin, history)
        values = {"origin": origin.value, "signature": signature, **place}
        if any(getattr(row, name) != value for name, value in values.items()):
            self._changed.append({"id": row.id, **values})

    def _place(self, origin: Origin, history: Sequence[Row[Any]]) -> dict[str, Any]:
        """Whether what is of that origin becomes current."""
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
        names = {each.winner.candidate.kernel.name for each in batch if each.winner.candidate}
        query = (
            select(KernelRow.name, PackRow.hash)
            .join(PackKernelRow, PackKernelRow.kernel_id == KernelRow.id)
            .join(PackRow, PackRow.id == PackKernelRow.pack_id)
            .order_by(PackRow.id)
        )
        found: dict[str, str] = {}
        for some in pieces(sorted(names)):
            rows = self._session.execute(query.where(KernelRow.name.in_(some)))
            found |= {name: pack for name, pack in rows}  # noqa: C416 - rows are no pairs
        return found

    def _write(self) -> None:
        self._taken.written += len(self._changed) + len(self._new)
        for some in pieces(self._replaced):  # first: there must never be two current ones
            was = update(WinnerRow).where(WinnerRow.id.in_(some))
            self._session.execute(was.values(is_current=False))
        if self._changed:
            self._session.execute(update(WinnerRow), self._changed)
        if self._new:
            self._session.execute(insert(WinnerRow), self._new)
