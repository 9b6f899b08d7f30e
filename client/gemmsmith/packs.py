"""Packs for the choices of a snapshot: fetched once, checked, kept, ready to be loaded.

A pack is a program that will run inside the training process, so nothing is handed out that does
not have the SHA-256 that it is named after, and nothing else stays on disk. Where a key is
configured (`GEMMSMITH_PACK_KEY`, the same on the service and on every machine that trains), packs
that the service has not signed with it are refused as well.

What that protects from: whoever can alter what is fetched or cached (a proxy, the network, a
shared folder, another service under the same address) but does not have the key cannot bring in a
program of his own. What it does not: the key is shared, so every machine that has it can sign; a
service that was taken over signs too; a signature says nothing of which kernel is best, so another
pack signed once may take a pack's place; and a file that is altered after it was checked, by
someone who may write to the cache folder, is loaded. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, Self

from gemmsmith.cache import PackCache, default_cache_dir
from gemmsmith.errors import (
    GemmsmithError,
    PackCorrupt,
    PackError,
    PackUntrusted,
)

KEY_VARIABLE = "GEMMSMITH_PACK_KEY"
MIN_KEY_LENGTH = 16
"""Characters. From one signature a shorter key could be guessed at leisure."""

_PURPOSE = b"gemmsmith kernel pack\n"
"""Signed along with the hash, so that a signature serves for nothing else."""

_TURN_S = 30.0
"""How long one process waits for another that is fetching. Then it fetches as well: when the
service is away, a machine's ranks must not wait out their time-outs one after the other."""

Read = Callable[[str], bytes]
"""Gets a pack's bytes by its hash."""


class Signed(Protocol):
    """What knows packs' signatures: a snapshot."""

    def packs(self) -> Mapping[str, str | None]:
        """Signatures by hash; None for a pack that is not signed."""
        ...


class Source(Protocol):
    """Where packs come from: `gemmsmith.Client`."""

    @property
    def cache_folder(self) -> Path:
        """Where packs are kept."""
        ...

    def pack_bytes(self, pack_hash: str) -> bytes:
        """A pack's bytes, not checked."""
        ...


class Packs:
    """Local files of packs. Safe to share between threads, its folder between processes.

    Args:
        read: gets what is not here.
        folder: the cache folder; by default the platform's.
        signed: asked for signatures, at every pack anew, so that a lookup's current snapshot can
            stand here.
        key: packs must be signed with; by default that of `GEMMSMITH_PACK_KEY`, if there is one.

    Raises:
        ValueError: the key is too short.
    """

    def __init__(
        self,
        read: Read,
        *,
        folder: Path | None = None,
        signed: Callable[[], Signed] | None = None,
        key: bytes | None = None,
    ) -> None:
        self._read = read
        self._cache = PackCache(folder if folder is not None else default_cache_dir())
        self._signed = signed
        self._key = checked_key(key) if key is not None else key_of()
        self._checked: dict[str, Path] = {}

    @classmethod
    def of(
        cls, source: Source, *, signed: Callable[[], Signed] | None = None, key: bytes | None = None
    ) -> Self:
        """Packs of a service, kept in its client's cache folder; `signed`, `key` as above."""
        return cls(source.pack_bytes, folder=source.cache_folder, signed=signed, key=key)

    def path(self, pack_hash: str) -> Path:
        """The pack as a local file, fetched unless it is here already.

        Raises:
            PackCorrupt: what arrived, or was here and cannot be replaced, has another SHA-256.
                Nothing of it is kept.
            PackUntrusted: a key is configured and the pack is not signed with it.
            PackError: the cache folder cannot be written to.
            ServiceError, ServiceUnavailable: the service has no such pack, or is away.
            ValueError: not a pack's hash.
        """
        found = self._checked.get(pack_hash)
        if found is not None:
            return found
        if self._key is not None:
            self._check_signature(self._key, pack_hash)
        found = self._cache.find(pack_hash)
        if found is None:
            found = self._fetch(pack_hash)
        self._checked[pack_hash] = found
        return found

    def _fetch(self, pack_hash: str) -> Path:
        path = self._cache.path(pack_hash)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _turn(path.parent):
                found = self._cache.find(pack_hash)  # by whoever had the turn before
                if found is not None:
                    return found
                damaged = path.exists()
                path.unlink(missing_ok=True)
                try:
                    content = self._read(pack_hash)
                except GemmsmithError as error:
                    if not damaged:
                        raise
                    raise PackCorrupt(
                        f"pack {pack_hash[:16]}… in {path.parent} was damaged and is removed, and "
                        f"cannot be fetched again: {error}"
                    ) from error
                return self._cache.store(pack_hash, content)
        except OSError as error:
            raise PackError(
                f"pack {pack_hash[:16]}… cannot be kept in {path.parent}: {error.strerror}; set "
                "GEMMSMITH_CACHE_DIR to a folder that can be written to"
            ) from error

    def _check_signature(self, key: bytes, pack_hash: str) -> None:
        given = self._signed().packs().get(pack_hash) if self._signed is not None else None
        if given is None:
            raise PackUntrusted(
                f"pack {pack_hash[:16]}… is not signed, and {KEY_VARIABLE} is set: set the same "
                "key where the service runs, or bake the bundle with it"
            )
        if not hmac.compare_digest(given.encode(), sign(key, pack_hash).encode()):
            raise PackUntrusted(
                f"pack {pack_hash[:16]}… is signed with another key than this machine's "
                f"{KEY_VARIABLE}"
            )


def sign(key: bytes, pack_hash: str) -> str:
    """The signature of a pack: HMAC-SHA256 of its hash, in hexadecimal digits."""
    return hmac.new(key, _PURPOSE + pack_hash.encode(), hashlib.sha256).hexdigest()


def key_of(environ: Mapping[str, str] | None = None) -> bytes | None:
    """The key in the environment variable `GEMMSMITH_PACK_KEY`; None where it is unset or empty.

    Raises:
        ValueError: it is too short; names the variable and what it takes.
    """
    text = (os.environ if environ is None else environ).get(KEY_VARIABLE, "")
    return checked_key(text.encode()) if text else None


def checked_key(key: bytes) -> bytes:
    """The key itself.

    Raises:
        ValueError: it is too short.
    """
    if len(key) < MIN_KEY_LENGTH:
        raise ValueError(
            f"{KEY_VARIABLE} must have {MIN_KEY_LENGTH} characters or more, got {len(key)}; "
            "`openssl rand -hex 32` makes a good one"
        )
    return key


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One thread of one process at a time, as far as that does not take too long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a network file system may refuse: then a pack is fetched twice
                break
            else:
                break
        yield
    finally:
        os.close(descriptor)  # releases the lock
