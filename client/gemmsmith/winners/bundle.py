"""A bundle: a file with a snapshot and the packs of its winners, for machines without a service.

A bundle is a zip file without compression. Its members are `snapshot.json`, and `packs/<hash>.so`
for every pack that the snapshot's choices name. The same winners and signer give the same bytes.
Each member is checked against its hash when it is read, so a damaged bundle raises PackCorrupt or
SnapshotCorrupt. The snapshot is signed when the bundle is baked. Its packs run only on machines
that trust the signer.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from gemmsmith.answers.snapshot import Snapshot
from gemmsmith.core.bounds import BOUNDS, Bounds, exceeded
from gemmsmith.errors import PackCorrupt
from gemmsmith.files import data_folder, replacing
from gemmsmith.winners.packs import Packs

_SNAPSHOT = "snapshot.json"
_PIECE = 2**20
_UNREADABLE = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError)


class Bundle:
    """An opened bundle. Use it with `Lookup(bundle.snapshot)` and `bundle.packs.path(hash)`.

    Attributes:
        path: the file; do not move it while packs are extracted from it.
        snapshot: the winners.
        packs: the winners' packs, extracted into the cache folder when they are first needed.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, folder: Path | None = None, bounds: Bounds = BOUNDS
    ) -> None:
        self.path = Path(path)
        self._bounds = bounds
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._check_sizes(archive)
                document = self._content(archive, _SNAPSHOT, "snapshot_bytes")
                held = {info.filename for info in archive.infolist()}
        except _UNREADABLE as error:
            raise PackCorrupt(f"{self.path} is not a whole bundle ({error}); bake it again") from (
                error
            )
        self.snapshot = Snapshot.parse(document)
        missing = [name for name in self.snapshot.packs() if _member(name) not in held]
        if missing:
            raise PackCorrupt(
                f"{self.path} lacks {len(missing)} of {len(self.snapshot.packs())} packs, first "
                f"{missing[0][:16]}…; bake it again"
            )
        self.packs = Packs(self._read, folder=folder, signed=lambda: self.snapshot)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, folder: Path | None = None, bounds: Bounds = BOUNDS
    ) -> Bundle:
        """Open a bundle; packs are extracted to `folder`, by default the platform's cache folder.

        Raises:
            PackCorrupt: the file is not a bundle, is truncated, or lacks a pack; or a member is
                compressed, or larger than `bounds` allow.
            SnapshotCorrupt: its winners were altered, or have a newer format.
            OSError: there is no such file, or it cannot be read.
        """
        return cls(path, folder=folder, bounds=bounds)

    def _read(self, pack_hash: str) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._check_sizes(archive)
                return self._content(archive, _member(pack_hash), "pack_bytes")
        except _UNREADABLE as error:
            raise PackCorrupt(
                f"pack {pack_hash[:16]}… cannot be read from {self.path} ({error}); bake it again"
            ) from error

    def _check_sizes(self, archive: zipfile.ZipFile) -> None:
        # Without compression and without overlap, no member is larger than the file.
        members = archive.infolist()
        stored = all(info.compress_type == zipfile.ZIP_STORED for info in members)
        if not stored or sum(info.file_size for info in members) > self.path.stat().st_size:
            raise PackCorrupt(
                f"{self.path} holds more than its own size, compressed or twice: no bundle that "
                "`gemmsmith bake` writes does; do not use it"
            )

    def _content(self, archive: zipfile.ZipFile, name: str, bound: str) -> bytes:
        if archive.getinfo(name).file_size > getattr(self._bounds, bound):
            raise PackCorrupt(exceeded(f"{name} of {self.path}", bound, self._bounds))
        return archive.read(name)


def kept_bundle(model: str) -> Path:
    """The bundle that `gemmsmith run --tune` keeps for this user and a device model's slug."""
    return data_folder() / "winners" / f"{model}.gspack"


def write_bundle(
    path: str | os.PathLike[str], snapshot: Snapshot, packs: Mapping[str, Path]
) -> int:
    """Write a bundle atomically. Returns its size in bytes.

    `packs` holds the files of all packs that the snapshot's choices name, by hash.

    Raises:
        PackCorrupt: a file is missing, or has another SHA-256 than its name says.
        OSError: the bundle cannot be written; an earlier file at `path` is unchanged.
    """
    with replacing(Path(path)) as aside:
        with zipfile.ZipFile(aside, "w") as archive:
            archive.writestr(zipfile.ZipInfo(_SNAPSHOT), snapshot.document)
            for pack_hash in sorted(snapshot.packs()):
                _add(archive, pack_hash, packs)
        return aside.stat().st_size


def _add(archive: zipfile.ZipFile, pack_hash: str, packs: Mapping[str, Path]) -> None:
    source = packs.get(pack_hash)
    if source is None or not source.exists():
        raise PackCorrupt(f"pack {pack_hash[:16]}… is not here; compile the winners again")
    digest = hashlib.sha256()
    info = zipfile.ZipInfo(_member(pack_hash))  # its date is always 1980: same packs, same bytes
    with source.open("rb") as file, archive.open(info, "w", force_zip64=True) as member:
        while piece := file.read(_PIECE):
            digest.update(piece)
            member.write(piece)
    if digest.hexdigest() != pack_hash:
        raise PackCorrupt(f"{source} does not have the SHA-256 of its name; compile it again")


def _member(pack_hash: str) -> str:
    return f"packs/{pack_hash}.so"
