"""Takes the packs of a file of kernels into the store, so that they need no compiler.

They are checked like packs from another machine: a trusted signature, bytes with the signed hash,
and the names of their kernels in the bytes. The whole file is checked before its first pack is
taken. Keys that ship with gemmsmith are trusted here too, though elsewhere they may sign winners
only: the user installs the file just as they installed gemmsmith. Packs of another toolchain or of
other sources are never matched.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from gemmsmith.errors import Untrusted
from gemmsmith.signing import UNSIGNED_VARIABLE, Signer, Trusted
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.kernels_file import Contents, packs
from tuner.compile.manifest import Manifest, Pack
from tuner.errors import DiskFull

_SPARE = 2**24
"""Bytes of a disk that are left free: manifests and the database grow as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackKeys:
    """Whose packs are taken.

    Attributes:
        trusted: keys whose packs are accepted; None accepts all packs, signed or not.
        shipped: further keys whose packs are accepted. `signer` signs these packs again, because
            the store does not accept them under a shipped key.
        signer: this installation's key.
    """

    trusted: Trusted | None
    shipped: Trusted
    signer: Signer

    def believed(self, contents: Contents, name: str) -> dict[str, Manifest]:
        """The manifests of a file, by hash, with signatures that the store accepts.

        Raises:
            Untrusted: no trusted key has signed the file, or one of its packs.
        """
        if self.trusted is None:
            return contents.packs
        try:
            try:
                return _checked(contents, self.trusted)
            except Untrusted:
                manifests = _checked(contents, self.shipped)
        except Untrusted as error:
            raise Untrusted(
                f"{name} is not installed: {error}. To trust its signer: gemmsmith signing trust "
                "KEY.pub, with the line that `gemmsmith signing show` prints where it was built; "
                f"{UNSIGNED_VARIABLE}=1 accepts unsigned packs"
            ) from None
        return {h: manifest.signed(h, self.signer) for h, manifest in manifests.items()}


def _checked(contents: Contents, keys: Trusted) -> dict[str, Manifest]:
    contents.check(keys)
    for pack_hash, manifest in contents.packs.items():
        manifest.check(pack_hash, keys)
    return contents.packs


def lacking(contents: Contents, store: ArtifactStore) -> set[str]:
    """Hashes of the packs of a file that the store does not have, or not for all their kernels."""
    here = dict(store.manifests(believed=True))
    return {
        pack_hash
        for pack_hash, manifest in contents.packs.items()
        if pack_hash not in here or not {*manifest.used_for} <= {*here[pack_hash].used_for}
    }


def install(
    store: ArtifactStore,
    file: BinaryIO,
    contents: Contents,
    manifests: dict[str, Manifest],
    name: str,
    progress: Callable[[str, int], None] = lambda _step, _number: None,
) -> Iterator[Pack]:
    """Take the packs that the store lacks, and yield them.

    What was taken stays if this ends early. To repeat it takes the rest.

    Args:
        store: where the packs go.
        file: a file that can be read twice, read up to its packs.
        contents: its list.
        manifests: what `PackKeys.believed` returned for it.
        name: the file's name, for messages.
        progress: called with `check` or `install`, and the number of packs that are done.

    Raises:
        PackCorrupt: the file is damaged, truncated, or holds more than its list says.
        PackError: there is too little memory.
        DiskFull: there is too little space.
    """
    wanted = lacking(contents, store)
    _check_space(store, sum(contents.packs[pack_hash].bytes for pack_hash in wanted))
    begin = file.tell()
    for number, _ in enumerate(packs(file, contents, name), 1):
        progress("check", number)
    file.seek(begin)
    for number, (pack_hash, content) in enumerate(packs(file, contents, name), 1):
        if pack_hash in wanted:
            manifest = manifests[pack_hash]
            manifest = msgspec.structs.replace(manifest, taken=sorted(manifest.used_for))
            yield store.adopt(pack_hash, content, manifest)
        progress("install", number)


def _check_space(store: ArtifactStore, needed: int) -> None:
    folder = next(folder for folder in (store.root, *store.root.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free:
        raise DiskFull(
            f"the packs need {needed / 1e6:.0f} MB under {store.root}, and {free / 1e6:.0f} MB are "
            "free: make room there; nothing was installed"
        )
