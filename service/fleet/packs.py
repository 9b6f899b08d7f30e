"""Packs that travel between the machines of a fleet: a folder or bucket that all of them reach.

Any fsspec URL will do. It holds what a packs folder holds, `<hash>.so` and `<hash>.json`, and is
believed no more than any other place: a pack is taken only under a signature that is believed, and
only if its bytes have the hash that was signed. Where all machines mount one packs folder, there is
nothing to carry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import structlog

from gemmsmith.errors import PackCorrupt, Untrusted
from gemmsmith.signing import Trusted
from tuner.compile import ArtifactStore, Pack
from tuner.compile.manifest import Manifest
from tuner.errors import TunerError

log = structlog.get_logger("gemmsmith.fleet")


class ShareError(TunerError):
    """The share of packs cannot be reached; the message names it."""


class Share:
    """Packs under a URL.

    Args:
        url: for fsspec: `s3://bucket/packs`, `file:///mnt/packs`, `memory://packs`.
        trusted: whose packs are taken; None: anybody's.

    Raises:
        ShareError: no such kind of URL, or what it needs is not installed.
    """

    def __init__(self, url: str, trusted: Trusted | None) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ShareError(f"the share {url}: {error}") from error
        self.url = url
        self._trusted = trusted
        self._there: set[str] = set()

    def push(self, artifacts: ArtifactStore, packs: Iterable[Pack]) -> None:
        """Put packs there, each manifest last, so that nobody finds half of one.

        Raises:
            ShareError: it cannot be written to.
        """
        for pack in packs:
            if pack.hash in self._there:
                continue
            found = artifacts.manifests(after=_before(pack.hash), limit=1)
            if not found or found[0][0] != pack.hash:
                continue  # evicted meanwhile
            try:
                if not self._files.exists(self._path(pack.hash, "json")):
                    self._files.makedirs(self._root, exist_ok=True)
                    self._files.pipe_file(self._path(pack.hash, "so"), pack.path.read_bytes())
                    manifest = msgspec.structs.replace(found[0][1], taken=None)
                    self._files.pipe_file(
                        self._path(pack.hash, "json"), msgspec.json.encode(manifest)
                    )
            except OSError as error:
                raise ShareError(f"the share {self.url}: {error}") from error
            self._there.add(pack.hash)

    def pull(self, artifacts: ArtifactStore, hashes: Iterable[str]) -> list[str]:
        """Take those packs that are not here yet; the hashes of those that could not be taken.

        Raises:
            ShareError: it cannot be read.
            DiskFull: no space for a pack.
        """
        refused = []
        for pack_hash in hashes:
            if artifacts.get(pack_hash) is not None:
                continue
            try:
                manifest = msgspec.json.decode(self._read(pack_hash, "json"), type=Manifest)
                if self._trusted is not None:
                    manifest.check(pack_hash, self._trusted)
                artifacts.adopt(pack_hash, self._read(pack_hash, "so"), _taken(manifest))
            except FileNotFoundError:
                refused.append(pack_hash)
            except (msgspec.DecodeError, PackCorrupt, Untrusted) as error:
                log.warning("pack_refused", pack=pack_hash, error=str(error))
                refused.append(pack_hash)
            except OSError as error:
                raise ShareError(f"the share {self.url}: {error}") from error
        return refused

    def _read(self, pack_hash: str, suffix: str) -> bytes:
        content: Any = self._files.cat_file(self._path(pack_hash, suffix))
        return bytes(content)

    def _path(self, pack_hash: str, suffix: str) -> str:
        return f"{self._root.rstrip('/')}/{pack_hash}.{suffix}"


def _taken(manifest: Manifest) -> Manifest:
    """All of it: the fleet asked for every kernel that is in there."""
    return msgspec.structs.replace(manifest, taken=sorted(manifest.digests))


def _before(pack_hash: str) -> str:
    """The greatest text below a hash of its length: pages of manifests begin behind it."""
    return f"{int(pack_hash, 16) - 1:064x}"
