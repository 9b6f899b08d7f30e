"""Snapshots as they are served: written once for all clients, and again when a winner changes.

A snapshot is one device model's winners as clients of some capabilities get them. Each request
checks whether winners have changed; requests that arrive during a check share the next one.

To read and write hundreds of thousands of rows takes seconds. Later reads take only what has
changed: what became current since (`tuner.store.changes`), and winners whose kernels are in another
pack now. After a change of what makes winners stale, all are read again.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple

import msgspec

from gemmsmith.answers import document
from gemmsmith.answers.snapshot import Row
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Config, Use
from gemmsmith.core.kernel import Backend
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.signing import Signer
from service import documents
from service.lookup.abilities import Abilities
from service.lookup.devices import Arch, Catalogue
from tuner.compile import ArtifactStore
from tuner.store import Store
from tuner.store.changes import Marks, newest
from tuner.store.served import Served

KEPT = 16
"""Snapshots kept at once: pairs of a device model and capabilities. They share their rows."""

_MANY = 500
"""Kernels in other packs from which all rows are read: databases limit a query's parameters."""


class What(NamedTuple):
    """The parts of a winner that decide which clients get its row, and when it is written again."""

    dtype: str
    kernel: str | None
    backend: Backend | None
    pack: str | None  # that the winner names itself


class PacksToRun(NamedTuple):
    """Packs that clients may get: those with a trusted signature.

    Attributes:
        newest: the newest pack of each kernel.
        held: pairs of a pack and a kernel in it.
    """

    newest: Mapping[str, str]
    held: Set[tuple[str, str]]

    @classmethod
    def of(cls, store: Store, artifacts: ArtifactStore) -> PacksToRun:
        """The packs that are here; the store knows a kernel's newest.

        Raises:
            StoreError: it cannot be read.
        """
        held = {
            (pack, kernel)
            for pack, manifest in artifacts.manifests(believed=True)
            for kernel in manifest.held
            if kernel is not None
        }
        packed = (pair for pair in store.changes.packed() if pair in held)
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
        # Two dictionaries: pairs would be 200,000 more objects for the garbage collector.
        self._rows: dict[bytes, bytes] = {}
        self._whats: dict[bytes, What] = {}
        self._known: dict[What, What] = {}  # one object for all equal ones: there are few

    def catch_up(self) -> None:
        """Read what has changed in the store; `version` grows if any row may have changed.

        Raises:
            StoreError: the store cannot be read; the next call reads the same changes.
        """
        seen, now = self._seen, self._store.changes.marks()
        if seen == now:
            return
        packs = PacksToRun.of(self._store, self._artifacts)
        # Also of another database, other rows than those of new winners may differ.
        if seen is None or seen.gpus != now.gpus or now.sequence < seen.sequence:
            self._rows, self._whats, self._known = {}, {}, {}
            self._put(self._store.served.on(self._device), packs)
        else:
            moved = self._moved(packs)
            if moved:
                only = moved if len(moved) < _MANY else None
                self._put(self._store.served.on(self._device, kernels=only), packs)
            self._put(self._store.served.on(self._device, since=seen.sequence), packs)
        self._seen, self._packs = now, packs  # last, so that a failed read is repeated

    def for_client(self, abilities: Abilities) -> list[bytes]:
        """The rows for clients of these abilities, in the order of their problems."""
        places, rows, whats = sorted(self._rows), self._rows, self._whats
        if abilities.backends is None and abilities.dtypes is None:
            return [rows[place] for place in places]
        runs = {what: abilities.runs(what.backend) for what in self._known}
        knows = abilities.dtypes
        listed = {
            what
            for what in self._known
            if (knows is None or what.dtype in knows)
            # A product that demands an order of sums is never torch's: its row is left out.
            and (runs[what] or of_dtype(what.dtype).summation is None)
        }
        return [
            rows[place] if runs[whats[place]] else _without_config(rows[place])
            for place in places
            if whats[place] in listed
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
        for winner, what, config in self._described(served, packs):
            place = _place(winner.problem)
            self._rows[place] = msgspec.json.encode(documents.row(winner, config))
            self._whats[place] = what
            self.version += 1

    def _described(
        self, served: Iterable[Served], packs: PacksToRun
    ) -> Iterator[tuple[Served, What, Config | None]]:
        """The winners with `What` and config, made once for all that share a candidate."""
        made: dict[tuple[str, int, str | None], tuple[What, Config | None, Candidate | None]] = {}
        for winner in served:
            dtype, candidate, pack = winner.problem.dtype, winner.candidate, winner.pack
            alike = (dtype, id(candidate), pack)
            if alike not in made:
                what, config = What(dtype, None, None, pack), None
                if candidate is not None:
                    kernel = candidate.kernel
                    what = What(dtype, kernel.name, kernel.backend, pack)
                    config = documents.config(candidate, packs.of_winner(pack, kernel.name))
                made[alike] = self._known.setdefault(what, what), config, candidate
            yield winner, *made[alike][:2]


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


class WrittenSnapshot:
    """One revision of a snapshot: the body, plain, and compressed on the first request for that.

    Threads may share it.

    Attributes:
        tag: its ETag, unquoted.
        length: bytes of the plain body.
    """

    def __init__(self, device: str, rows: Sequence[bytes], signer: Signer) -> None:
        self._head = document.Head.of(device, rows, signer)
        self._rows = rows
        self.revision = self._head.revision
        self.tag = document.tag_of(self.revision, self._head.signature)
        self.length = document.length_of(self._head, rows)
        self._lock = threading.Lock()

    def pieces(self) -> Iterator[bytes]:
        """The plain body, of which only the rows are kept."""
        return document.whole(self._head, self._rows)

    def compressed(self) -> bytes:
        with self._lock:
            return self._compressed

    @cached_property
    def _compressed(self) -> bytes:
        gzip = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
        return b"".join([*map(gzip.compress, self.pieces()), gzip.flush()])


class Snapshots:
    """The snapshots of one store. Threads share it.

    Args:
        catalogue: knows the device models.
        artifacts: the packs that are here.
        signer: signs every snapshot.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        artifacts: ArtifactStore,
        signer: Signer,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._artifacts = artifacts
        self._signer = signer
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[threading.Lock, WrittenRows]] = {}
        self._kept: OrderedDict[tuple[str, Abilities], tuple[int, WrittenSnapshot]] = OrderedDict()

    def newest(
        self, arch: Arch | None, device: str | None, abilities: Abilities
    ) -> WrittenSnapshot | None:
        """The newest snapshot for clients of these abilities; None if no device model is known.

        Raises:
            ProblemError: no such device, or it is of another architecture.
            StoreError: the changes cannot be read.
        """
        model = self._catalogue.resolve(arch, device)
        return None if model is None else self.current(model.slug, abilities)

    def current(self, device: str, abilities: Abilities) -> WrittenSnapshot:
        """As `newest`, of a device model that is known."""
        key = (device, abilities)
        with self._lock:
            new = threading.Lock(), WrittenRows(self._store, device, self._artifacts)
            reading, rows = self._rows.setdefault(device, new)
        with reading:
            rows.catch_up()
            version, snapshot = self._kept.get(key, (0, None))
            if snapshot is None or version != rows.version:
                newer = WrittenSnapshot(device, rows.for_client(abilities), self._signer)
                if snapshot is None or newer.revision != snapshot.revision:
                    snapshot = newer
            with self._lock:
                self._kept[key] = rows.version, snapshot
                self._kept.move_to_end(key)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return snapshot
