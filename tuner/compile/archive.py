"""All packs of a folder in one tar file, and back.

A pack goes in with its manifest; the last member says how many there are, since a tar file that is
cut off between two members looks like a shorter one. Coming back, each pack is taken in as one from
another machine is: under the hash that its bytes have, or not at all.
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
    """Write the whole packs to the file `target`, which appears when complete; their number.

    Packs that are evicted meanwhile are left out.

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
    """Read a whole archive, so that it can be refused before anything is changed.

    Raises:
        PackCorrupt: not such an archive, or damaged.
    """
    for _ in _read(source):
        pass


def unarchive(source: Path, store: ArtifactStore) -> int:
    """Take in the packs of an archive; their number. Packs that are here already stay.

    Raises:
        PackCorrupt: not such an archive, or damaged; the packs before the fault are here, whole.
        DiskFull: no space for a pack; likewise.
    """
    number = 0
    for pack_hash, content, manifest in _read(source):
        store.adopt(pack_hash, content, manifest)
        number += 1
    return number


def _read(source: Path) -> Iterator[tuple[str, bytes, Manifest]]:
    """The packs of an archive: hash, bytes that have it, and manifest."""
    number, end = 0, None
    manifest: dict[str, Manifest] = {}  # of the pack that follows
    for pack_hash, content in _members(source):
        if end is not None:
            raise _no_archive(source, "it goes on after its end")
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
            raise _no_archive(source, f"pack {pack_hash} has other bytes")
        else:
            number += 1
            yield pack_hash, content, manifest[pack_hash]
    if end != number:
        raise _no_archive(source, "its end is missing")


def _members(source: Path) -> Iterator[tuple[str, bytes | Manifest | _End]]:
    """The hash in each member's name, and its content."""
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
    """The hash in the member's name, and what of a pack it is; nothing of either for the end.

    Raises:
        tarfile.TarError: another name, or no plain file: a link, a device, a folder, a file with
            holes.
    """
    name = _NAME.fullmatch(member.name)
    if name is None:
        raise tarfile.TarError(f"it holds {member.name!r:.100}")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise tarfile.TarError(f"{member.name} in it is no plain file")
    return name[1], name[2]


def _no_archive(source: Path, why: str) -> PackCorrupt:
    return PackCorrupt(f"{source} is no whole archive of packs ({why})")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o644
    tar.addfile(member, BytesIO(content))
