"""Packs for the choices of a snapshot: fetched once, checked, cached, and ready to be loaded.

A pack is a program that runs inside the training process. A pack is used only if its SHA-256 is the
one in its name; other files are deleted. It must also be named by a snapshot that is signed with a
key that this machine trusts (`gemmsmith.signing`), unless `GEMMSMITH_UNSIGNED` is set.

This protects against changes on the way: a proxy, the network, a shared folder or another service
under the same address can neither add a program nor replace a signed pack by another signed pack.
It does not protect against a service that was taken over, which can sign anything, nor against an
old snapshot: it stays valid as long as its key is trusted. Nothing is encrypted. A cache folder
that other users may write to is not used, because a file could change after it was checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gemmsmith.answers.cache import PackCache, default_cache_dir
from gemmsmith.errors import GemmsmithError, PackCorrupt, PackError, PackUntrusted, Untrusted
from gemmsmith.files import private_folder, turn
from gemmsmith.signing import UNSIGNED_VARIABLE, Trusted, trusted_folder, unsigned_allowed

if TYPE_CHECKING:
    from gemmsmith.answers.snapshot import Snapshot
    from gemmsmith.http.client import Client

ANYWHERE = "python -m gemmsmith trust KEY.pub, the line that `gemmsmith signing show` prints there"
"""How to trust a signer, for messages, if no service is known that could provide its key."""

_TURN_S = 30.0
"""Seconds that a process waits for another process that is fetching. Then it fetches as well: if
the service does not answer, the time-outs of a machine's ranks must not add up."""

Read = Callable[[str], bytes]
"""Returns a pack's bytes, by its hash."""


class Packs:
    """Local files of packs. Safe to share between threads, its folder between processes.

    Args:
        read: fetches a pack that is not cached.
        folder: the cache folder; by default the platform's.
        signed: returns the snapshot that names the packs; called for every pack, so it can return
            a lookup's current snapshot. Without it, packs have no trusted signature.
        how: how to trust the signer, for messages.
    """

    def __init__(
        self,
        read: Read,
        *,
        folder: Path | None = None,
        signed: Callable[[], Snapshot] | None = None,
        how: str = ANYWHERE,
    ) -> None:
        self._read = read
        self._cache = PackCache(folder if folder is not None else default_cache_dir())
        self._signed = signed
        self._how = how
        self._trusted: Snapshot | None = None
        self._checked: dict[str, Path] = {}

    @classmethod
    def of(cls, client: Client, *, signed: Callable[[], Snapshot] | None = None) -> Self:
        """The packs of a service, cached in its client's folder; `signed` as above."""
        return cls(client.pack_bytes, folder=client.cache_folder, signed=signed, how=asking(client))

    def path(self, pack_hash: str) -> Path:
        """The pack as a local file, fetched unless it is cached.

        Raises:
            PackCorrupt: the fetched or cached bytes have another SHA-256; they are deleted.
            PackUntrusted: it is in no snapshot with a trusted signature.
            PackError: the cache folder cannot be written to, or others may write to it.
            ServiceError, ServiceUnavailable: the service has no such pack, or cannot be reached.
            ValueError: not a pack's hash, or `GEMMSMITH_UNSIGNED` is neither 0 nor 1.
        """
        path = self._checked.get(pack_hash)
        if path is not None:
            return path
        self._check_signature(pack_hash)
        path = self._cache.find(pack_hash) or self._fetch(pack_hash)
        self._checked[pack_hash] = path
        return path

    def _fetch(self, pack_hash: str) -> Path:
        path = self._cache.path(pack_hash)
        try:
            private_folder(path.parent)
            with turn(path.parent, patience_s=_TURN_S):
                # Another process may have fetched it while this one waited.
                cached = self._cache.find(pack_hash)
                if cached is not None:
                    return cached
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

    def _check_signature(self, pack_hash: str) -> None:
        if unsigned_allowed():
            return
        snapshot = self._signed() if self._signed is not None else None
        if snapshot is None or pack_hash not in snapshot.packs():
            raise PackUntrusted(
                f"pack {pack_hash[:16]}… is not run: no snapshot here names it, so it "
                f"has no signature. Give Packs the snapshot, or set {UNSIGNED_VARIABLE}=1"
            )
        if snapshot is not self._trusted:
            believe(snapshot, self._how)
            self._trusted = snapshot


def believe(snapshot: Snapshot, how: str = ANYWHERE) -> None:
    """Check that the snapshot has a trusted signature, if it has packs.

    `how` says in messages how to trust its signer.

    Raises:
        PackUntrusted: it has no trusted signature; the message says what to do.
    """
    if not snapshot.packs():
        return
    try:
        if not unsigned_allowed():
            snapshot.check(Trusted.load(trusted_folder()))
    except (Untrusted, ValueError, OSError) as error:
        raise PackUntrusted(
            f"the kernels of snapshot {snapshot.revision[:16]} are not run: {error}. To trust "
            f"its signer: {how}; {UNSIGNED_VARIABLE}=1 runs unsigned packs"
        ) from error


def asking(client: Client) -> str:
    """The command that trusts a service."""
    return f"python -m gemmsmith trust {client.url}"
