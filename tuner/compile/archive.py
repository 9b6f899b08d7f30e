"""Writes all packs of a folder to one tar file, and reads them back.

A pack follows its manifest. The last member holds the number of packs, because a tar file that is
cut off between two members looks like a shorter archive. When read back, a pack is taken in like a
pack from another machine: only if its bytes have the hash in its name.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import msgspec

from gemmsmith.errors import PackCorrupt
from gemmsmith.files import replacing
from tuner.compile.artifacts import ArtifactStore
from tuner.compile.manifest import Manifest

_END = "end.json"
_NAME = re.compile(r"([0-9a-f]{64})\.(json|so)|end\.json", re.ASCII)


class _End(msgspec.Struct, frozen=True):
    """The last member: how many packs there are."""

    packs: int


def archive(store: ArtifactStore, target: Path) -> int:
    """Write all whole packs to the file `target`, which appears when it is complete.

    Packs that are evicted meanwhile are left out. Returns the number of packs written.

    Raises:
        OSError: no space, or no permission; no file is left.
    """
    number = 0
    with replacing(target) as aside:
        aside.touch(mode=0o600)
        with tarfile.open(aside, mode="w") as tar:
            for pack_hash, manifest in store.manifests():
                try:
                    content = (store.root / f"{pack_hash}.so").read_bytes()
                except FileNotFoundError:
                    continue
                _add(tar, f"{pack_hash}.json", msgspec.json.encode(manifest))
                _add(tar, f"{pack_hash}.so", content)
                number += 1
            _add(tar, _END, msgspec.json.encode(_End(packs=number)))
    return number


def check(source: Path) -> None:
    """Read a whole archive, so that a bad archive is refused before anything is changed.

    Raises:
        PackCorrupt: the file is not an archive of packs, or is damaged.
    """
    for _ in _read(source):
        pass


def unarchive(source: Path, store: ArtifactStore) -> int:
    """Take the packs of an archive into the store. Packs that are in it already stay.

    Returns the number of packs in the archive.

    Raises:
        PackCorrupt: the file is not an archive of packs, or is damaged.
        DiskFull: no space for a pack.
            In both cases the packs before the fault are in the store, whole.
    """
    number = 0
    for pack_hash, content, manifest in _read(source):
        store.adopt(pack_hash, content, manifest)
        number += 1
    return number


def _read(source: Path) -> Iterator[tuple[str, bytes, Manifest]]:
    """Yield the hash, the verified bytes and the manifest of each pack of an archive."""
    number, end = 0, None
    manifest: dict[str, Manifest] = {}  # only that of the pack that follows
    for pack_hash, content in _members(source):
        if end is not None:
            raise _no_archive(source, "it continues after its end")
        if isinstance(content, _End):
            end = content.packs
        elif isinstance(content, Manifest):
            manifest = {pack_hash: content}
        elif pack_hash not in manifest:
            raise _no_archive(source, f"pack {pack_hash} has no manifest before it")
        elif (
            hashlib.sha256(content).hexdigest() != pack_hash
            or len(content) != manifest[pack_hash].bytes
        ):
            raise _no_archive(source, f"the bytes of pack {pack_hash} do not match its hash")
        else:
            number += 1
            yield pack_hash, content, manifest[pack_hash]
    if end != number:
        raise _no_archive(source, "its end is missing")


def _members(source: Path) -> Iterator[tuple[str, bytes | Manifest | _End]]:
    """Yield the hash in each member's name, and the member's content."""
    try:
        with tarfile.open(source, "r:") as tar:
            for member in tar:
                pack_hash, kind = _checked(member)
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if kind == "so":
                    yield pack_hash, content
                elif kind == "json":
                    yield pack_hash, msgspec.json.decode(content, type=Manifest)
                else:
                    yield "", msgspec.json.decode(content, type=_End)
    except (tarfile.TarError, msgspec.DecodeError, ValueError) as error:
        raise _no_archive(source, str(error)) from error


def _checked(member: tarfile.TarInfo) -> tuple[str, str]:
    """The hash and the suffix in the member's name; both None for the last member.

    Raises:
        tarfile.TarError: the name is another, or the member is not a plain file but a link, a
            device, a folder or a sparse file.
    """
    name = _NAME.fullmatch(member.name)
    if name is None:
        raise tarfile.TarError(f"it holds {member.name!r:.100}")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise tarfile.TarError(f"{member.name} in it is not a plain file")
    return name[1], name[2]


def _no_archive(source: Path, reason: str) -> PackCorrupt:
    return PackCorrupt(f"{source} is not a complete archive of packs ({reason})")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o644
    tar.addfile(member, BytesIO(content))
