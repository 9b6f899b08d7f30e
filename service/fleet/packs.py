"""A share of packs: a folder or bucket that all machines of a fleet reach, at any fsspec URL.

It has the files of a packs folder, `<hash>.so` and `<hash>.json`. It is not trusted: a pack is
taken only if a trusted key has signed it and its bytes have the signed hash. A fleet whose machines
all mount one packs folder needs no share.
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
        trusted: the keys whose packs are taken; None for packs of any key.

    Raises:
        ShareError: fsspec does not know this kind of URL, or a package for it is not installed.
    """

    def __init__(self, url: str, trusted: Trusted | None) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ShareError(f"the share {url}: {error}") from error
        self.url = url
        self._trusted = trusted
        self._shared: set[str] = set()

    def push(self, artifacts: ArtifactStore, packs: Iterable[Pack]) -> None:
        """Write packs to the share.

        A manifest is written after its pack, because readers look for the manifest first.

        Raises:
            ShareError: the share cannot be written to.
        """
        for pack in packs:
            if pack.hash in self._shared:
                continue
            page = artifacts.manifests(after=_before(pack.hash), limit=1)
            if not page or page[0][0] != pack.hash:
                continue  # evicted meanwhile
            manifest = msgspec.structs.replace(page[0][1], taken=None)
            try:
                if not self._files.exists(self._path(pack.hash, "json")):
                    self._files.makedirs(self._root, exist_ok=True)
                    self._files.pipe_file(self._path(pack.hash, "so"), pack.path.read_bytes())
                    self._files.pipe_file(
                        self._path(pack.hash, "json"), msgspec.json.encode(manifest)
                    )
            except OSError as error:
                raise ShareError(f"the share {self.url}: {error}") from error
            self._shared.add(pack.hash)

    def pull(self, artifacts: ArtifactStore, hashes: Iterable[str]) -> list[str]:
        """Take the packs of the hashes that are not here yet.

        Returns:
            The hashes of packs that could not be taken: absent, damaged or not trusted.

        Raises:
            ShareError: the share cannot be read.
            DiskFull: there is no space for a pack.
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
    # Of a pack from elsewhere only the taken kernels are used. The fleet requested all of this one.
    return msgspec.structs.replace(manifest, taken=sorted(manifest.digests))


def _before(pack_hash: str) -> str:
    """Return the greatest hash below this one: pages of manifests begin after a hash."""
    return f"{int(pack_hash, 16) - 1:064x}"
