"""Snapshots as they are served: written once for all clients, and again when a winner changes.

A snapshot is one device model's winners as clients of some capabilities get them. Each request
checks whether winners have changed; requests that arrive during a check share the next one.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from gemmsmith.answers import document
from gemmsmith.core.kernel import Backend
from gemmsmith.signing import Signer
from service.http.abilities import EVERYTHING, Abilities
from service.http.requests import Arch
from service.http.turns import Turns
from service.lookup.devices import Catalogue
from service.lookup.snapshot_rows import WrittenRows
from tuner.compile import ArtifactStore
from tuner.store import Store

KEPT = 16
"""Snapshots kept at once: pairs of a device model and capabilities. They share their rows."""

A = TypeVar("A", bound=Hashable)
T = TypeVar("T")


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
        """The body as gzip."""
        with self._lock:
            return self._compressed

    @cached_property
    def _compressed(self) -> bytes:
        gzip = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
        return b"".join([*map(gzip.compress, self.pieces()), gzip.flush()])


class Snapshots:
    """The snapshots of one store, for one event loop.

    Args:
        catalogue: knows the device models.
        artifacts: the packs that are here.
        signer: signs every snapshot.
        turns: of the clients whose requests write snapshots.
    """

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        artifacts: ArtifactStore,
        signer: Signer,
        turns: Turns,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._artifacts = artifacts
        self._signer = signer
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[threading.Lock, WrittenRows]] = {}
        self._kept: OrderedDict[tuple[str, Abilities], tuple[int, WrittenSnapshot]] = OrderedDict()
        self._turns = turns
        self._newest = OncePerTurn(self._in_turn)

    async def newest(
        self, client: str, arch: Arch | None, device: str | None, abilities: Abilities
    ) -> WrittenSnapshot | None:
        """The newest snapshot for clients of these abilities; None if no device model is known.

        Raises:
            ProblemError: no such device, or it is of another architecture.
            StoreError: the changes cannot be read.
        """
        return await self._newest((client, arch, device, _plain(abilities)))

    async def compressed(self, client: str, snapshot: WrittenSnapshot) -> bytes:
        """The snapshot's body as gzip, compressed in the client's turn."""
        return await self._turns.run(client, snapshot.compressed)

    async def _in_turn(
        self, request: tuple[str, Arch | None, str | None, Abilities]
    ) -> WrittenSnapshot | None:
        client, arch, slug, abilities = request
        return await self._turns.run(client, self._resolved, arch, slug, abilities)

    def _resolved(
        self, arch: Arch | None, slug: str | None, abilities: Abilities
    ) -> WrittenSnapshot | None:
        model = self._catalogue.resolve(arch, slug)
        return None if model is None else self.current(model.slug, abilities)

    def current(self, device: str, abilities: Abilities) -> WrittenSnapshot:
        """As `newest`, of a device model that is known; to be called from any thread."""
        key = (device, _plain(abilities))
        with self._lock:
            new = threading.Lock(), WrittenRows(self._store, device, self._artifacts)
            reading, rows = self._rows.setdefault(device, new)
        with reading:
            rows.catch_up()
            version, snapshot = self._kept.get(key, (0, None))
            if snapshot is None or version != rows.version:
                newer = WrittenSnapshot(device, rows.for_client(key[1]), self._signer)
                if snapshot is None or newer.revision != snapshot.revision:
                    snapshot = newer
            with self._lock:
                self._kept[key] = rows.version, snapshot
                self._kept.move_to_end(key)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return snapshot


def _plain(abilities: Abilities) -> Abilities:
    """The same abilities for all clients that get the same rows."""
    if abilities.backends is None:
        return abilities
    known = abilities.backends & {*Backend}
    if abilities.dtypes is None and known == {*Backend}:
        return EVERYTHING
    return Abilities(backends=known, dtypes=abilities.dtypes)


class OncePerTurn(Generic[A, T]):
    """A function that is called once for all requests that arrive before the call begins.

    So no result is older than the request. For one event loop.
    """

    def __init__(self, function: Callable[[A], Awaitable[T]]) -> None:
        self._function = function
        self._now: dict[A, asyncio.Task[T]] = {}
        self._next: dict[A, asyncio.Task[T]] = {}

    async def __call__(self, argument: A) -> T:
        """The function's result for `argument`; raises what it raises."""
        turn = self._next.get(argument)
        if turn is None:
            turn = asyncio.create_task(self._turn(argument, self._now.get(argument)))
            turn.add_done_callback(_noticed)
            self._next[argument] = turn
        return await asyncio.shield(turn)

    async def _turn(self, argument: A, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        this = self._now[argument] = self._next.pop(argument)
        try:
            return await self._function(argument)
        finally:
            if self._now.get(argument) is this:
                del self._now[argument]


def _noticed(turn: asyncio.Task[T]) -> None:
    """All requests may have been cancelled meanwhile: then asyncio would log the failure."""
    if not turn.cancelled():
        turn.exception()
