"""Snapshots as they are served: written once for all clients, and again when a winner changes.

A snapshot is one device model's winners as clients of some capabilities get them. Each request
checks whether winners have changed; requests that arrive during a check share the next one.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property

from gemmsmith.answers import document
from gemmsmith.signing import Signer
from service.lookup.abilities import Abilities
from service.lookup.devices import Arch, Catalogue
from service.lookup.snapshot_rows import WrittenRows
from tuner.compile import ArtifactStore
from tuner.store import Store

KEPT = 16
"""Snapshots kept at once: pairs of a device model and capabilities. They share their rows."""


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
