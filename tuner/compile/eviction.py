"""Keeps a folder of packs below a size: removes the packs that were unused for longest.

A manifest's modification time is the time of its pack's last use by any process, to within
`MARK_EVERY_S`, so all processes that share the folder agree on the order. A lock on the folder
excludes publishing and evicting from each other. Finding takes no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gemmsmith.files import turn

ASIDE = ".aside-"
"""Prefix of files that no process reads: incomplete, or about to be removed."""

MARK_EVERY_S = 3600.0
"""Seconds between two marks of a pack as used, so that a lookup rarely writes."""

SAFE_S = 3600.0
"""Seconds for which a used pack stays: a tuning run in any process may be about to measure it."""

TARGET = 0.9
"""Share of the limit that eviction goes down to, so that not every publication has to evict."""

_STALE_S = 3600.0
"""Seconds after which the files of a killed process are removed."""

_PATIENCE_S = 5.0
"""Seconds to wait for the folder's lock. Publishing and evicting hold it for milliseconds."""

_FILE = re.compile(r"([0-9a-f]{64})\.(so|json)")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeLimit:
    """How large a folder of packs may grow, and which packs must stay.

    Attributes:
        bytes: packs and manifests together; above it, packs are removed.
        keep: returns hashes of packs that are never removed; called only before an eviction.
        evicted: called with the hash of each removed pack, while no process can publish it again.
    """

    bytes: int
    keep: Callable[[], Collection[str]] = frozenset
    evicted: Callable[[str], None] = lambda _: None


@dataclass(kw_only=True, slots=True)
class _Files:
    """A pack's files: their bytes, and the time of its last use (Unix time)."""

    bytes: int = 0
    used: float = 0.0
    manifest: bool = False


class Evictor:
    """Keeps one folder within its limit."""

    def __init__(self, root: Path, limit: SizeLimit) -> None:
        self._root = root
        self._limit = limit
        self._warned = False

    def make_room(self, published: str) -> None:
        """After a publication, bring a folder above its limit down to TARGET of the limit.

        The published pack, packs used within SAFE_S and those that `keep` names stay. If these are
        too much, the folder stays above its limit, with one warning.
        """
        if _total(_scan(self._root)) <= self._limit.bytes:
            return
        keep = {published, *self._limit.keep()}
        with locked(self._root, exclusive=True):
            packs = _scan(self._root)  # again: another process may have made room meanwhile
            total = _total(packs)
            if total > self._limit.bytes:
                total = self._evict(packs, keep, total)
        if total <= self._limit.bytes:
            self._warned = False
        elif not self._warned:
            self._warned = True
            _LOG.warning(
                "%s holds %.2f GB of packs, more than its limit of %.2f GB: all of them are "
                "winners' packs or in use. Raise the limit",
                self._root,
                total / 1e9,
                self._limit.bytes / 1e9,
            )

    def _evict(self, packs: dict[str, _Files], keep: Collection[str], total: int) -> int:
        for pack_hash, files in sorted(packs.items(), key=lambda item: (item[1].used, item[0])):
            # The packs are in order of use: once one is in use, so are all that follow.
            if total <= self._limit.bytes * TARGET or _in_use(files.used):
                break
            if pack_hash not in keep and _remove(self._root, pack_hash):
                total -= files.bytes
                self._limit.evicted(pack_hash)
        return total


def mark_used(manifest: Path) -> None:
    """Mark a pack as used now.

    Raises:
        FileNotFoundError: it has just been evicted.
    """
    if time.time() - manifest.stat().st_mtime < MARK_EVERY_S:
        return
    try:
        os.utime(manifest)
    except FileNotFoundError:
        raise
    except OSError:
        return  # another user's folder, or a read-only one: this process evicts nothing there


def remove_stale(root: Path) -> None:
    """Remove what killed processes left: temporary files, and shared objects without a manifest."""
    for path in root.iterdir():
        name = _FILE.fullmatch(path.name)
        unlisted = name and name[2] == "so" and not path.with_suffix(".json").exists()
        if not (unlisted or path.name.startswith(ASIDE)):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process finished or removed it
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()


def locked(root: Path, *, exclusive: bool = False) -> AbstractContextManager[None]:
    """Lock the folder: for one evicting process (`exclusive`), or for any number of publishers."""
    # If the lock is not obtained in time, the block runs without it. The worst that can happen is
    # that a pack is evicted while it is published; it is then compiled once more.
    return turn(root, exclusive=exclusive, patience_s=_PATIENCE_S)


def _scan(root: Path) -> dict[str, _Files]:
    """All packs by hash. The last use of a pack without a manifest is the time it was written."""
    packs: dict[str, _Files] = {}
    with os.scandir(root) as entries:
        for entry in entries:
            name = _FILE.fullmatch(entry.name)
            if name is None:
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # another process removed it
            files = packs.setdefault(name[1], _Files())
            files.bytes += status.st_size
            if name[2] == "json" or not files.manifest:
                files.used = status.st_mtime
            files.manifest = files.manifest or name[2] == "json"
    return packs


def _total(packs: dict[str, _Files]) -> int:
    return sum(files.bytes for files in packs.values())


def _in_use(used: float) -> bool:
    # The last mark of a pack that was used a moment ago may be MARK_EVERY_S old.
    return time.time() - used < SAFE_S + MARK_EVERY_S


def _remove(root: Path, pack_hash: str) -> bool:
    """Remove a pack, the manifest first.

    Returns False if the pack was used a moment ago, or belongs to another user.
    """
    manifest, aside = root / f"{pack_hash}.json", root / f"{ASIDE}{pack_hash}"
    try:
        with contextlib.suppress(FileNotFoundError):
            # Finding takes no lock. So the time is read once more after the renaming: a pack that
            # was used a moment ago gets its manifest back, and a process that searches later misses
            # it. A shared object that a process has open stays valid without a name.
            manifest.rename(aside)
            if _in_use(aside.stat().st_mtime):
                aside.rename(manifest)
                return False
            aside.unlink()
        (root / f"{pack_hash}.so").unlink(missing_ok=True)
    except OSError as error:
        _LOG.debug("cannot evict %s: %s", pack_hash, error)
        return False
    return True
