"""A device model's winners as rows of a snapshot, written once and then kept up to date.

To read and write hundreds of thousands takes seconds. Later reads take only what has changed: what
became current since (`tuner.store.changes`), and winners whose kernels are in another pack now.
After a change of what makes winners stale, all are read again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import msgspec

from gemmsmith.answers.snapshot import Row
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Use
from gemmsmith.core.kernel import Backend
from gemmsmith.core.problem import Problem
from service.http import documents
from service.http.abilities import Abilities
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.store.changes import Marks, newest
from tuner.store.served import Served

_MANY = 500
"""Kernels in other packs from which all rows are read: databases limit a query's parameters."""


class What(NamedTuple):
    """What of a winner says who can read its row, and when that is written anew."""

    dtype: str
    kernel: str | None
    backend: Backend | None
    pack: str | None  # that the winner names itself


class PacksToRun(NamedTuple):
    """Packs that may be handed on: those that somebody who is believed has signed.

    Attributes:
        newest: by kernel.
        held: each with each kernel that it was taken for.
    """

    newest: Mapping[str, str]
    held: Set[tuple[str, str]]

    @classmethod
    def of(cls, store: Store, artifacts: ArtifactStore) -> PacksToRun:
        """Those that are here; which of them is a kernel's newest, the store knows.

        Raises:
            StoreError: it cannot be read.
        """
        held = {
            (pack, kernel)
            for pack, manifest in artifacts.believed().items()
            for kernel in manifest.held
            if kernel is not None
        }
        packed = (each for each in store.changes.packed() if each in held)
        return cls(newest(packed), held)

    def of_winner(self, pack: str | None, kernel: str) -> str | None:
        """The pack that a winner's kernel is run from: its own, else the newest with the kernel."""
        if pack is not None and (pack, kernel) in self.held:
            return pack
        return self.newest.get(kernel)


class WrittenRows:
    """One device model's rows, by the place of their problem. For one thread at a time."""

    def __init__(self, store: Store, device: str, artifacts: ArtifactStore) -> None:
        self.version = 0
        self._store = store
        self._device = device
        self._artifacts = artifacts
        self._seen: Marks | None = None
        self._packs = PacksToRun({}, frozenset())
        self._rows: dict[bytes, tuple[bytes, What]] = {}
        self._known: dict[What, What] = {}  # one object for all equal ones: there are few

    def catch_up(self) -> None:
        """Have what the store has by now, and another `version` if anything may be different.

        Raises:
            StoreError: it cannot be read; the next call makes up for it.
        """
        seen, now = self._seen, self._store.changes.marks()
        if seen == now:
            return
        packs = PacksToRun.of(self._store, self._artifacts)
        if seen is None or _is_other(seen, now):
            self._rows, self._known = {}, {}
            self._put(self._store.served.on(self._device), packs)
        else:
            moved = self._moved(packs)
            if moved:
                only = moved if len(moved) < _MANY else None
                self._put(self._store.served.on(self._device, kernels=only), packs)
            self._put(self._store.served.on(self._device, since=seen.sequence), packs)
        self._seen, self._packs = now, packs  # last: what fails is tried again

    def for_client(self, abilities: Abilities) -> list[bytes]:
        """The rows for clients of these abilities, in the order of their problems."""
        ordered = (self._rows[place] for place in sorted(self._rows))
        if abilities.backends is None and abilities.dtypes is None:
            return [row for row, _ in ordered]
        runs = {what: abilities.runs(what.backend) for what in self._known}
        knows = abilities.dtypes
        return [
            row if runs[what] else _without_config(row)
            for row, what in ordered
            if knows is None or what.dtype in knows
        ]

    def _moved(self, packs: PacksToRun) -> set[str]:
        """Kernels whose winners are run from another pack now, or from none."""
        return {
            what.kernel
            for what in self._known
            if what.kernel is not None
            and packs.of_winner(what.pack, what.kernel)
            != self._packs.of_winner(what.pack, what.kernel)
        }

    def _put(self, served: Iterable[Served], packs: PacksToRun) -> None:
        for each, what, config in self._described(served, packs):
            row = msgspec.json.encode(documents.row(each, config))
            self._rows[_place(each.problem)] = row, what
            self.version += 1

    def _described(
        self, served: Iterable[Served], packs: PacksToRun
    ) -> Iterator[tuple[Served, What, Config | None]]:
        """Each with what is the same of many: made once, as that takes longer than the rest."""
        made: dict[tuple[str, int, str | None], tuple[What, Config | None, Candidate | None]] = {}
        for each in served:
            dtype, candidate, pack = each.problem.dtype, each.candidate, each.pack
            alike = (dtype, id(candidate), pack)
            if alike not in made:
                what, config = What(dtype, None, None, pack), None
                if candidate is not None:
                    kernel = candidate.kernel
                    what = What(dtype, kernel.name, kernel.backend, pack)
                    config = documents.config(candidate, packs.of_winner(pack, kernel.name))
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
    """The row for clients that cannot run its config: torch's own operator."""
    winner = msgspec.json.decode(row, type=Row)
    plain = Row(
        problem=winner.problem,
        use=Use.CUBLAS,
        stale=winner.stale,
        environment=winner.environment,
    )
    return msgspec.json.encode(plain)
