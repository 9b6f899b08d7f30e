"""Snapshots as they are served: written once for all who ask, and from then on as they change.

An edition is one device model's rows as callers of some abilities are told them, under their
revision. It never changes. It knows the editions before it, and so what became of their rows: who
has one of those is sent the difference. Whether there is a newer edition is looked at whenever
somebody asks; those who ask while somebody looks wait for the next look, together.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import Generic, TypeVar, TypeVarTuple

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

EDITIONS = 16
"""Kept at once: pairs of a device model and what callers can run. They share their rows."""

EARLIER = 8
"""Editions that are remembered before each: clients look once a minute."""

_PIECE = 2**18

A = TypeVar("A", bound=Hashable)
Ts = TypeVarTuple("Ts")
T = TypeVar("T")


class Content:
    """A body: plain, and compressed once somebody takes it so. Threads may share it.

    Attributes:
        pieces: makes the plain body, of which only its parts are kept.
        length: bytes of that.
    """

    def __init__(self, pieces: Callable[[], Iterable[bytes]], length: int) -> None:
        self.pieces = pieces
        self.length = length
        self._lock = threading.Lock()

    def compressed(self) -> bytes:
        """The body as gzip."""
        with self._lock:
            return self._compressed

    @cached_property
    def _compressed(self) -> bytes:
        gzip = zlib.compressobj(level=1, wbits=16 + zlib.MAX_WBITS)
        return b"".join([*map(gzip.compress, self.pieces()), gzip.flush()])


class Edition:
    """One revision of a snapshot.

    Attributes:
        tag: its ETag, unquoted.
        whole: the document.
        version: of the rows that it was made of.
    """

    def __init__(
        self,
        device: str,
        rows: Sequence[bytes],
        version: int,
        before: Edition | None,
        signer: Signer,
    ) -> None:
        self._head = document.Head.of(device, rows, signer)
        self.revision = self._head.revision
        self.tag = document.tag_of(self.revision, self._head.signature)
        self.version = version
        self._rows = rows
        self._earlier: dict[str, Sequence[bytes]] = {}
        if before is not None:
            kept = [*before._earlier.items(), (before.revision, before._rows)]
            self._earlier = dict(kept[-EARLIER:])
        length = document.length_of(self._head, rows)
        self.whole = Content(lambda: document.whole(self._head, rows), length)
        self._deltas: dict[str, Content] = {}
        self._lock = threading.Lock()

    def since(self, revision: str) -> Content | None:
        """What has changed since that revision; None where that is not known, or no less."""
        before = self._earlier.get(revision)
        if before is None:
            return None
        with self._lock:
            if revision not in self._deltas:
                delta = document.delta(self._head, revision, before, self._rows)
                self._deltas[revision] = Content(lambda: [delta], len(delta))
        found = self._deltas[revision]
        return found if found.length < self.whole.length else None


class Snapshots:
    """The editions of one store, for one event loop.

    Args:
        catalogue: knows the device models.
        artifacts: the packs that are here.
        signer: signs every edition.
        turns: of the clients whose questions make editions.
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
        self._editions: OrderedDict[tuple[str, Abilities], Edition] = OrderedDict()
        self._turns = turns
        self._newest = OncePerTurn(self._looked)

    async def newest(
        self, client: str, arch: Arch | None, device: str | None, abilities: Abilities
    ) -> Edition | None:
        """The newest edition for callers of these abilities; None while no device model is known.

        Raises:
            ProblemError: no such device, or it is of another architecture.
            StoreError: what changed cannot be read.
        """
        return await self._newest((client, arch, device, _plain(abilities)))

    async def in_turn(self, client: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """What the function gives, called where editions are made."""
        return await self._turns.run(client, function, *arguments)

    async def _looked(
        self, asked: tuple[str, Arch | None, str | None, Abilities]
    ) -> Edition | None:
        client, *_ = asked
        return await self._turns.run(client, self._look, asked)

    def _look(self, asked: tuple[str, Arch | None, str | None, Abilities]) -> Edition | None:
        _, arch, slug, abilities = asked
        model = self._catalogue.resolve(arch, slug)
        return None if model is None else self.current(model.slug, abilities)

    def current(self, device: str, abilities: Abilities) -> Edition:
        """As `newest`, of a device model that is known; to be called from any thread."""
        key = (device, _plain(abilities))
        with self._lock:
            new = threading.Lock(), WrittenRows(self._store, device, self._artifacts)
            reading, rows = self._rows.setdefault(device, new)
        with reading:
            rows.catch_up()
            found = self._editions.get(key)
            if found is None or found.version != rows.version:
                newer = Edition(device, rows.told(key[1]), rows.version, found, self._signer)
                if found is not None and found.revision == newer.revision:
                    found.version = rows.version
                else:
                    found = newer
        with self._lock:
            self._editions[key] = found
            self._editions.move_to_end(key)
            if len(self._editions) > EDITIONS:
                self._editions.popitem(last=False)
        return found


def _plain(abilities: Abilities) -> Abilities:
    """The same abilities for all who are told the same."""
    if abilities.backends is None:
        return abilities
    known = abilities.backends & {*Backend}
    if abilities.dtypes is None and known == {*Backend}:
        return EVERYTHING
    return Abilities(backends=known, dtypes=abilities.dtypes)


class OncePerTurn(Generic[A, T]):
    """A function that is called once for all who ask before it begins.

    What they get is then never older than their question. For one event loop.
    """

    def __init__(self, function: Callable[[A], Awaitable[T]]) -> None:
        self._function = function
        self._now: dict[A, asyncio.Task[T]] = {}
        self._next: dict[A, asyncio.Task[T]] = {}

    async def __call__(self, argument: A) -> T:
        """What the function gives for `argument`; raises what it raises."""
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
    """Those who asked may have gone away meanwhile; then nobody else looks at a failure."""
    if not turn.cancelled():
        turn.exception()
