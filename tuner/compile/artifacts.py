"""Compiled kernel packs on disk, each under the SHA-256 of its bytes.

A pack is `<hash>.so` with a manifest `<hash>.json` that says which kernels it holds, in order, and
which toolchain built it. Publication is atomic: both files are written aside, flushed and renamed,
the manifest last, and a pack without a manifest does not exist. What is damaged or truncated is
removed and counts as a miss. Several processes may publish the same kernels at once: each
pack is whole, and any of them is found.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from gemmsmith.files import publish
from gemmsmith.kernel import Kernel
from tuner.codegen import kernel_digest
from tuner.compile.toolchain import Toolchain
from tuner.errors import DiskFull

_HASH = re.compile(r"[0-9a-f]{64}")
_ASIDE = ".aside-"
_write = partial(publish, durable=True, shared=True, aside=_ASIDE)
_STALE_S = 3600.0
"""Files that a killed process left aside are removed after this long."""
_SETTLE_NS = 2_000_000_000
"""Directory times are coarse: a listing younger than this may have missed a change."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """A compiled shared object; a kernel's index in it is its position in `kernels`."""

    hash: str
    path: Path
    kernels: tuple[str, ...]


class _Manifest(msgspec.Struct, frozen=True):
    """What `<hash>.json` holds; `digests` are kernel digests in the order of `kernels`."""

    kernels: list[str]
    digests: list[str]
    toolchain: str
    nvcc: str
    cutlass: str
    bytes: int
    created_at: str
    format: int = 1


class ArtifactStore:
    """The packs below one directory, which is created when first written to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests: dict[str, _Manifest] = {}
        self._by_kernel: dict[str, list[str]] = {}
        self._listed_ns = -1
        self._verified: dict[str, tuple[int, int]] = {}
        self._prepared = False

    def find(self, kernel: Kernel, *, toolchain: str | None = None) -> Pack | None:
        """The newest whole pack with exactly this kernel in it.

        Args:
            kernel: matched by what it compiles from, not only by its name.
            toolchain: digest of the only toolchain to accept; any by default.
        """
        self._refresh()
        hashes = self._by_kernel.get(kernel_digest(kernel), [])
        for pack_hash in sorted(hashes, key=self._age_key, reverse=True):
            manifest = self._manifests.get(pack_hash)
            if manifest is None or toolchain not in (None, manifest.toolchain):
                continue
            pack = self.get(pack_hash)
            if pack is not None:
                return pack
        return None

    def get(self, pack_hash: str) -> Pack | None:
        """The pack of this hash if it is here and its bytes are whole; else None."""
        if not _HASH.fullmatch(pack_hash):
            return None
        path = self._pack_path(pack_hash)
        manifest = self._manifests.get(pack_hash) or self._read_manifest(pack_hash)
        if manifest is None:
            return None
        try:
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if self._verified.get(pack_hash) != stamp:
                with path.open("rb") as file:
                    actual = hashlib.file_digest(file, "sha256").hexdigest()
                if actual != pack_hash:
                    self._discard(pack_hash)
                    return None
                self._verified[pack_hash] = stamp
        except FileNotFoundError:
            self._discard(pack_hash)
            return None
        return Pack(hash=pack_hash, path=path, kernels=tuple(manifest.kernels))

    def packs(self) -> list[Pack]:
        """Every whole pack, the newest first."""
        self._refresh()
        hashes = sorted(self._manifests, key=self._age_key, reverse=True)
        return [pack for pack in map(self.get, hashes) if pack is not None]

    def publish(self, compiled: Path, kernels: Sequence[Kernel], toolchain: Toolchain) -> Pack:
        """Take a freshly compiled shared object in, under the hash of its bytes.

        Raises:
            DiskFull: nothing was published, and nothing half-written is left.
        """
        content = compiled.read_bytes()
        pack_hash = hashlib.sha256(content).hexdigest()
        manifest = _Manifest(
            kernels=[kernel.name for kernel in kernels],
            digests=[kernel_digest(kernel) for kernel in kernels],
            toolchain=toolchain.digest,
            nvcc=toolchain.version,
            cutlass=toolchain.cutlass,
            bytes=len(content),
            created_at=datetime.now(UTC).isoformat(),
        )
        try:
            self._prepare()
            if self.get(pack_hash) is None:
                _write(self._pack_path(pack_hash), content)
            _write(self._manifest_path(pack_hash), msgspec.json.encode(manifest))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            if self._read_manifest(pack_hash) is None:
                self._pack_path(pack_hash).unlink(missing_ok=True)
            raise DiskFull(
                f"no space left for a {len(content) >> 10} KiB pack under {self.root}: free some "
                "space and try again; nothing was half-written"
            ) from error
        self._forget(pack_hash)  # the same bytes may have been here under another toolchain
        self._read_manifest(pack_hash)
        return Pack(
            hash=pack_hash, path=self._pack_path(pack_hash), kernels=tuple(manifest.kernels)
        )

    def _pack_path(self, pack_hash: str) -> Path:
        return self.root / f"{pack_hash}.so"

    def _manifest_path(self, pack_hash: str) -> Path:
        return self.root / f"{pack_hash}.json"

    def _age_key(self, pack_hash: str) -> tuple[str, str]:
        manifest = self._manifests.get(pack_hash)
        return (manifest.created_at if manifest else "", pack_hash)

    def _refresh(self) -> None:
        """Read the manifests that appeared since the last look; forget those that went."""
        try:
            changed_ns = self.root.stat().st_mtime_ns
        except FileNotFoundError:
            self._manifests.clear()
            self._by_kernel.clear()
            return
        if changed_ns == self._listed_ns:
            return
        found = {
            entry.name.removesuffix(".json")
            for entry in os.scandir(self.root)
            if entry.name.endswith(".json")
        }
        for gone in self._manifests.keys() - found:
            self._forget(gone)
        for pack_hash in found - self._manifests.keys():
            self._read_manifest(pack_hash)
        settled = time.time_ns() - changed_ns > _SETTLE_NS
        self._listed_ns = changed_ns if settled else -1

    def _read_manifest(self, pack_hash: str) -> _Manifest | None:
        if not _HASH.fullmatch(pack_hash):
            return None
        try:
            content = self._manifest_path(pack_hash).read_bytes()
            manifest = msgspec.json.decode(content, type=_Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            self._discard(pack_hash)
            return None
        self._forget(pack_hash)
        self._manifests[pack_hash] = manifest
        for digest in manifest.digests:
            self._by_kernel.setdefault(digest, []).append(pack_hash)
        return manifest

    def _forget(self, pack_hash: str) -> None:
        manifest = self._manifests.pop(pack_hash, None)
        self._verified.pop(pack_hash, None)
        for digest in manifest.digests if manifest else []:
            self._by_kernel[digest].remove(pack_hash)

    def _discard(self, pack_hash: str) -> None:
        """Remove a pack that is not whole, the manifest first, so that nobody finds it again."""
        self._forget(pack_hash)
        self._manifest_path(pack_hash).unlink(missing_ok=True)
        self._pack_path(pack_hash).unlink(missing_ok=True)

    def _prepare(self) -> None:
        """Make the directory; once per store, remove what killed processes left in it."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self._prepared:
            return
        self._prepared = True
        for path in self.root.glob(f"{_ASIDE}*"):
            try:
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()
            except FileNotFoundError:
                continue  # its owner finished, or another process removed it
