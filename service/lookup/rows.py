"""A device model's winners as rows of a snapshot, written once and kept as the store has them.

Reading and writing hundreds of thousands takes seconds. From then on only those are read that
changed: what became current since (`tuner.store.changes`), and winners of kernels that are in
another pack now. What makes winners stale, on the other hand, makes all of them be read anew.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from gemmsmith.answer import Config, Use
from gemmsmith.candidate import Candidate
from gemmsmith.kernel import Backend
from gemmsmith.packs import key_of
from gemmsmith.problem import Problem
from gemmsmith.snapshot import Row
from service.http import documents
from service.http.abilities import Abilities
from tuner.store import Store
from tuner.store.changes import Marks
from tuner.store.served import Served

_MANY = 500
"""Kernels in other packs from which all rows are read: databases limit a query's parameters."""


class What(NamedTuple):
    """What of a winner says who can read its row, and when that is written anew."""

    dtype: str
    kernel: str | None
    backend: Backend | None
    pack: str | None  # that the winner names itself


class WrittenRows:
    """One device model's rows, in the order of their problems. For one thread at a time."""

    def __init__(self, store: Store, device: str) -> None:
        self.version = 0
        self._store = store
        self._device = device
        self._seen: tuple[Marks, bytes | None] | None = None
        self._packs: Mapping[str, str] = {}
        self._order: list[bytes] = []
        self._rows: list[bytes] = []
        self._whats: list[What] = []
        self._known: dict[What, What] = {}  # each once: there are few

    def catch_up(self) -> None:
        """Have what the store has by now, and another `version` if anything may be different.

        Raises:
            StoreError: it cannot be read; the next call makes up for it.
        """
        seen, now, key = self._seen, self._store.changes.marks(), key_of()
        if seen == (now, key):
            return
        packs, hashes = self._packs, frozenset[str]()
        if seen is None or seen[0].packs != now.packs:
            packed = self._store.changes.packed()
            packs = {kernel: pack for pack, kernel in packed if kernel is not None}
            hashes = frozenset(pack for pack, _ in packed)
        if seen is None or seen[1] != key or _is_other(seen[0], now):
            self._order, self._rows, self._whats, self._known = [], [], [], {}
            self._put(self._store.served.on(self._device), packs, key)
        else:
            if seen[0].packs != now.packs:
                moved = self._moved(packs, hashes)
                only = moved if len(moved) < _MANY else None
                self._put(self._store.served.on(self._device, kernels=only), packs, key)
            newer = self._store.served.on(self._device, since=seen[0].sequence)
            self._put(newer, packs, key)
        self._seen, self._packs = (now, key), packs  # last: what fails is tried again

    def told(self, abilities: Abilities) -> list[bytes]:
        """The rows as they are told to callers of these abilities."""
        if abilities.backends is None and abilities.dtypes is None:
            return list(self._rows)
        runs = {what: abilities.runs(what.backend) for what in self._known}
        knows = abilities.dtypes
        return [
            row if runs[what] else _without_config(row)
            for row, what in zip(self._rows, self._whats, strict=True)
            if knows is None or what.dtype in knows
        ]

    def _moved(self, packs: Mapping[str, str], hashes: frozenset[str]) -> set[str]:
        """Kernels whose winners name another pack now, or one that is gone."""
        return {
            what.kernel
            for what in self._known
            if what.kernel is not None
            and (
                packs.get(what.kernel) != self._packs.get(what.kernel)
                if what.pack is None
                else what.pack not in hashes
            )
        }

    def _put(self, served: Iterable[Served], packs: Mapping[str, str], key: bytes | None) -> None:
        sorted_until = len(self._order)
        for each, what, config in self._described(served, packs):
            row = msgspec.json.encode(documents.row(each, config, key))
            place = _place(each.problem)
            at = bisect_left(self._order, place, hi=sorted_until)
            if at < sorted_until and self._order[at] == place:
                self._rows[at], self._whats[at] = row, what
            else:
                self._order.append(place)
                self._rows.append(row)
                self._whats.append(what)
            self.version += 1
        if len(self._order) > sorted_until:
            ranks = sorted(range(len(self._order)), key=self._order.__getitem__)
            self._order = [self._order[rank] for rank in ranks]
            self._rows = [self._rows[rank] for rank in ranks]
            self._whats = [self._whats[rank] for rank in ranks]

    def _described(
        self, served: Iterable[Served], packs: Mapping[str, str]
    ) -> Iterator[tuple[Served, What, Config | None]]:
        """Each with what is the same of many: made once, as that takes longer than the rest."""
        made: dict[tuple[str, int, str | None], tuple[What, Config | None, Candidate | None]] = {}
        for each in served:
            dtype, candidate, pack = each.problem.dtype, each.candidate, each.pack
            alike = (dtype, id(candidate), pack)
            if alike not in made:
                what = What(dtype, None, None, pack)
                if candidate is not None:
                    kernel = candidate.kernel
                    what = What(dtype, kernel.name, kernel.backend, pack)
                config = documents.config(candidate, pack, packs.get)
                made[alike] = self._known.setdefault(what, what), config, candidate
            yield each, *made[alike][:2]


def _is_other(before: Marks, now: Marks) -> bool:
    """Whether more may be different than what became current: or it is another database."""
    return before.gpus != now.gpus or now.sequence < before.sequence


def _place(problem: Problem) -> bytes:
    """Bytes that order as problems do."""
    sizes = struct.pack(">4I", problem.m, problem.n, problem.k, problem.batch)
    return sizes + f"{problem.dtype}\0{problem.layout}".encode()


def _without_config(row: bytes) -> bytes:
    """The row to those who cannot run its config: torch's own operator."""
    found = msgspec.json.decode(row, type=Row)
    plain = Row(problem=found.problem, use=Use.CUBLAS, stale=found.stale)
    return msgspec.json.encode(plain)
