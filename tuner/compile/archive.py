"""All packs of a folder in one tar file, and back.

A pack goes in with its manifest; the last member says how many there are, since a tar file that is
cut off between two members looks like a shorter one. Coming back, each pack is taken in as one from
another machine is: under the hash that its bytes have, or not at all.
"""

from __future__ import annotations

import hashlib
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
            _add(tar, _END, msgspec.json.encode({"packs": number}))
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
    number, manifest = 0, None
    end: dict[str, int] = {}
    try:
        with tarfile.open(source, "r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                content = file.read() if file is not None else b""
                pack_hash, _, kind = member.name.partition(".")
                if member.name == _END:
                    end = msgspec.json.decode(content, type=dict[str, int])
                elif kind == "json":
                    manifest = msgspec.json.decode(content, type=Manifest)
                elif kind == "so" and manifest is not None:
                    if hashlib.sha256(content).hexdigest() != pack_hash:
                        raise PackCorrupt(f"pack {pack_hash} in {source} has other bytes")
                    number += 1
                    yield pack_hash, content, manifest
    except (tarfile.TarError, msgspec.DecodeError) as error:
        raise PackCorrupt(f"{source} is no whole archive of packs ({error})") from error
    if end.get("packs") != number:
        raise PackCorrupt(f"{source} is no whole archive of packs (its end is missing)")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o644
    tar.addfile(member, BytesIO(content))
