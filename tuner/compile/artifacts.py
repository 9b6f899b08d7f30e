"""Compiled kernel packs on disk, each under the SHA-256 of its bytes.

A pack is `<hash>.so` with a manifest `<hash>.json`, which lists the pack's kernels, in order, and
names the toolchain that built it. Publication is atomic: both files are written under temporary
names, flushed and renamed, the manifest last; a pack without a manifest does not exist. A damaged
or truncated pack is removed and counts as a miss. If several processes publish the same kernels at
once, all their packs are whole and any of them is returned. With a size limit, publishing removes
the packs that were unused for longest (`tuner.compile.eviction`); `find` and `get` use a pack.
Published packs are signed, and `find` returns only packs with a trusted signature.

Packs are not used if other users may write to the file or the folder.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.errors import PackCorrupt, Untrusted
from gemmsmith.files import private_folder, publish, unsafe
from gemmsmith.signing import Signer, Trusted
from tuner.backends.unit import kernel_digest
from tuner.compile.eviction import ASIDE, Evictor, SizeLimit, locked, mark_used, remove_stale
from tuner.compile.manifest import Manifest, Pack
from tuner.compile.toolchain import Toolchain
from tuner.errors import DiskFull, StoreError

_LOG = logging.getLogger(__name__)
_HASH = re.compile(r"[0-9a-f]{64}")
_write = partial(publish, durable=True, shared=True, aside=ASIDE)
_SETTLE_NS = 2_000_000_000
"""Directory times are coarse: a listing younger than this may have missed a change."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ArtifactStore:
    """The packs in one directory, which is created by the first publication.

    Safe to share between threads.

    Args:
        root: the directory.
        limit: size limit of the directory, applied when this object publishes a pack.
        signer: signs published packs.
        trusted: keys whose packs are used; None: all packs are.

    Any method may raise StoreError: other users may write to the directory.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit: SizeLimit | None = None,
        signer: Signer | None = None,
        trusted: Trusted | None = None,
    ) -> None:
        self.root = root
        self._signer = signer
        self._trusted = trusted
        self._believed: dict[str, tuple[Manifest, bool]] = {}
        self._evictor = None if limit is None else Evictor(root, limit)
        self._index_lock = threading.RLock()
        self._manifests: dict[str, Manifest] = {}
        self._by_kernel: dict[str, list[str]] = {}
        self._inodes: dict[str, int] = {}
        self._listed_ns = -1
        self._verified: dict[str, tuple[int, int]] = {}
        self._prepared = False

    def find(self, kernel: AnyKernel, *, toolchain: str | None = None) -> Pack | None:
        """The newest whole pack that holds exactly this kernel; None if there is no such pack.

        Args:
            kernel: compared by the digest of its source text, not only by its name.
            toolchain: digest of the only toolchain to accept; any by default.
        """
        self._refresh()
        hashes = self._by_kernel.get(kernel_digest(kernel), [])
        for pack_hash in sorted(hashes, key=self._age_key, reverse=True):
            manifest = self._manifests.get(pack_hash)
            if manifest is None or toolchain not in (None, manifest.toolchain):
                continue
            if not self._believes(pack_hash, manifest):
                continue
            pack = self.get(pack_hash)
            if pack is not None:
                return pack
        return None

    def get(self, pack_hash: str, *, afresh: bool = False) -> Pack | None:
        """The pack with this hash; None if it is not here or its bytes are damaged.

        A pack is hashed again if the size or the time of its file has changed. With `afresh` it is
        hashed in any case: a faulty disk changes bytes without either.
        """
        if afresh:
            self._verified.pop(pack_hash, None)
        pack = self._whole(pack_hash)
        if pack is not None:
            try:
                mark_used(self._manifest_path(pack_hash))
            except FileNotFoundError:  # another process has just evicted it
                self._forget(pack_hash)
                return None
        return pack

    def _whole(self, pack_hash: str) -> Pack | None:
        if not _HASH.fullmatch(pack_hash):
            return None
        self._refuse_unsafe()
        path = self._pack_path(pack_hash)
        manifest = self._manifests.get(pack_hash) or self._read_manifest(pack_hash)
        if manifest is None:
            return None
        try:
            if reason := unsafe(path):
                _LOG.warning("a pack is not used: %s", reason)
                return None
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            # Hashing reads the whole file: an unchanged one is not hashed again.
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
        return self._pack(pack_hash, manifest)

    def packs(self) -> list[Pack]:
        """All whole packs, the newest first. Does not mark them as used."""
        self._refresh()
        hashes = sorted(self._manifests, key=self._age_key, reverse=True)
        return [pack for pack in map(self._whole, hashes) if pack is not None]

    def manifests(
        self,
        *,
        toolchain: str | None = None,
        after: str = "",
        limit: int | None = None,
        believed: bool = False,
    ) -> list[tuple[str, Manifest]]:
        """Hashes and manifests of packs, in order of hash. Does not mark them as used.

        Args:
            toolchain: digest of the only toolchain to list; any by default.
            after: the cursor of the next page: only hashes after this one, which need not exist.
            limit: the most packs to list.
            believed: list only packs with a trusted signature, which may be handed on.
        """
        self._refresh()
        page: list[tuple[str, Manifest]] = []
        for pack_hash in sorted(self._manifests):
            manifest = self._manifests.get(pack_hash)
            if pack_hash <= after or manifest is None:
                continue
            if toolchain not in (None, manifest.toolchain):
                continue
            if believed and not self._believes(pack_hash, manifest):
                continue
            if self._looks_whole(pack_hash, manifest):
                page.append((pack_hash, manifest))
                if len(page) == limit:
                    break
        return page

    def believes(self, pack_hash: str) -> bool:
        """Whether the pack is here with a trusted signature, so that it may be handed on."""
        self._refresh()
        manifest = self._manifests.get(pack_hash) or self._read_manifest(pack_hash)
        return manifest is not None and self._believes(pack_hash, manifest)

    def _believes(self, pack_hash: str, manifest: Manifest) -> bool:
        if self._trusted is None:
            return True
        known = self._believed.get(pack_hash)
        if known is None or known[0] is not manifest:  # a check takes 0.1 ms
            try:
                manifest.check(pack_hash, self._trusted)
            except Untrusted:
                known = (manifest, False)
            else:
                known = (manifest, True)
            self._believed[pack_hash] = known
        return known[1]

    def sign(self, signer: Signer) -> int:
        """Sign the packs that were compiled here before packs were signed; returns their number."""
        number = 0
        with locked(self.root):
            for pack_hash, manifest in self.manifests():
                if manifest.signature is None and manifest.taken is None:
                    self._write_manifest(pack_hash, manifest.signed(pack_hash, signer))
                    self._read_manifest(pack_hash)
                    number += 1
        return number

    def publish(self, compiled: Path, kernels: Sequence[AnyKernel], toolchain: Toolchain) -> Pack:
        """Add a freshly compiled shared object under the hash of its bytes.

        Raises:
            DiskFull: nothing was published, and no incomplete file is left.
        """
        content = compiled.read_bytes()
        manifest = Manifest(
            kernels=[kernel.name for kernel in kernels],
            digests=[kernel_digest(kernel) for kernel in kernels],
            toolchain=toolchain.digest,
            nvcc=toolchain.version,
            cutlass=toolchain.cutlass,
            bytes=len(content),
            created_at=datetime.now(UTC).isoformat(),
        )
        pack_hash = hashlib.sha256(content).hexdigest()
        if self._signer is not None:
            manifest = manifest.signed(pack_hash, self._signer)
        return self._put(pack_hash, content, manifest)

    def adopt(self, pack_hash: str, content: bytes, manifest: Manifest) -> Pack:
        """Add a pack that was published elsewhere, with its manifest from there.

        A pack that was compiled here keeps its own manifest. The caller must have checked the
        signature of the other.

        Raises:
            PackCorrupt: the bytes are not those of that pack; nothing was published.
            DiskFull: nothing was published, and no incomplete file is left.
        """
        actual = hashlib.sha256(content).hexdigest()
        if actual != pack_hash:
            raise PackCorrupt(
                f"pack {pack_hash} is refused: its {len(content)} bytes have the SHA-256 {actual}"
            )
        if manifest.bytes != len(content):
            raise PackCorrupt(
                f"pack {pack_hash} is refused: it has {len(content)} bytes, its manifest says "
                f"{manifest.bytes}"
            )
        here = self._read_manifest(pack_hash)
        if here is not None and self._whole(pack_hash) is not None:
            # If it was taken before for other kernels, it is used for both.
            if here.statement(pack_hash) == manifest.statement(pack_hash):
                manifest = manifest.joined(here)
            elif here.taken is None:
                return self._pack(pack_hash, here)
        return self._put(pack_hash, content, manifest)

    def _put(self, pack_hash: str, content: bytes, manifest: Manifest) -> Pack:
        try:
            self._prepare()
            with locked(self.root):
                if self._whole(pack_hash) is None:
                    _write(self._pack_path(pack_hash), content)
                self._write_manifest(pack_hash, manifest)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            # A shared object without a manifest is not a pack, and would only take space.
            if self._read_manifest(pack_hash) is None:
                self._pack_path(pack_hash).unlink(missing_ok=True)
            raise DiskFull(
                f"no space left for a {len(content) >> 10} KiB pack under {self.root}: free some "
                "space and try again; nothing was half-written"
            ) from error
        self._forget(pack_hash)  # the same bytes may have been here under another toolchain
        self._read_manifest(pack_hash)
        if self._evictor is not None:
            self._evictor.make_room(pack_hash)
        return self._pack(pack_hash, manifest)

    def _pack(self, pack_hash: str, manifest: Manifest) -> Pack:
        return Pack(
            hash=pack_hash,
            path=self._pack_path(pack_hash),
            kernels=manifest.held,
            toolchain=manifest.toolchain,
        )

    def _looks_whole(self, pack_hash: str, manifest: Manifest) -> bool:
        try:
            return self._pack_path(pack_hash).stat().st_size == manifest.bytes
        except FileNotFoundError:
            return False

    def _pack_path(self, pack_hash: str) -> Path:
        return self.root / f"{pack_hash}.so"

    def _manifest_path(self, pack_hash: str) -> Path:
        return self.root / f"{pack_hash}.json"

    def _age_key(self, pack_hash: str) -> tuple[str, str]:
        manifest = self._manifests.get(pack_hash)
        return (manifest.created_at if manifest else "", pack_hash)

    def _refresh(self) -> None:
        """Read the manifests that are new or changed since the last call; forget the removed."""
        self._refuse_unsafe()
        with self._index_lock:
            try:
                changed_ns = self.root.stat().st_mtime_ns
            except FileNotFoundError:
                self._manifests.clear()
                self._by_kernel.clear()
                return
            if changed_ns == self._listed_ns:
                return
            inodes = {
                entry.name.removesuffix(".json"): entry.inode()
                for entry in os.scandir(self.root)
                if entry.name.endswith(".json")
            }
            for gone in self._manifests.keys() - inodes.keys():
                self._forget(gone)
            for pack_hash, inode in inodes.items():
                # A manifest that was written again may be signed now, or taken for more kernels.
                if pack_hash not in self._manifests or self._inodes.get(pack_hash) != inode:
                    self._read_manifest(pack_hash)
            self._inodes = inodes
            settled = time.time_ns() - changed_ns > _SETTLE_NS
            self._listed_ns = changed_ns if settled else -1

    def _write_manifest(self, pack_hash: str, manifest: Manifest) -> None:
        _write(self._manifest_path(pack_hash), msgspec.json.encode(manifest))

    def _read_manifest(self, pack_hash: str) -> Manifest | None:
        if not _HASH.fullmatch(pack_hash):
            return None
        try:
            content = self._manifest_path(pack_hash).read_bytes()
            manifest = msgspec.json.decode(content, type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            self._discard(pack_hash)
            return None
        with self._index_lock:
            self._forget(pack_hash)
            self._manifests[pack_hash] = manifest
            for digest in manifest.used_for:
                self._by_kernel.setdefault(digest, []).append(pack_hash)
        return manifest

    def _forget(self, pack_hash: str) -> None:
        with self._index_lock:
            manifest = self._manifests.pop(pack_hash, None)
            self._verified.pop(pack_hash, None)
            for digest in manifest.used_for if manifest else []:
                self._by_kernel[digest].remove(pack_hash)

    def _discard(self, pack_hash: str) -> None:
        # The manifest goes first: without it, no process uses the damaged pack.
        self._forget(pack_hash)
        self._manifest_path(pack_hash).unlink(missing_ok=True)
        self._pack_path(pack_hash).unlink(missing_ok=True)

    def _refuse_unsafe(self) -> None:
        with suppress(FileNotFoundError):
            # Between the check and the load, another user could replace a file by another program.
            if reason := unsafe(self.root):
                raise StoreError(f"packs are not used: {reason}")

    def _prepare(self) -> None:
        """Create the directory; the first time, remove the files that killed processes left."""
        private_folder(self.root)
        self._refuse_unsafe()
        if self._prepared:
            return
        self._prepared = True
        remove_stale(self.root)
