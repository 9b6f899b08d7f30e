"""Answers and packs on disk, so that training goes on when the service is away.

Invariants: an entry is written aside and renamed, so any number of processes may read and write
at once and none sees half an entry; an entry that cannot be read, is not a regular file, belongs to
another question or has another format is a miss, never an error; a folder that cannot be written to
costs the cache, not the answer. Answers are kept forever, since an old answer is still a working
kernel, and are revalidated with the service (ETag) whenever it is there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import sys
from io import BufferedReader
from pathlib import Path

import msgspec

from gemmsmith.answers import understood
from gemmsmith.answers.answer import Answer
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem, PackCorrupt, PackError
from gemmsmith.files import publish, unsafe, xdg_folder
from gemmsmith.http.requests import Query

log = logging.getLogger("gemmsmith")

FORMAT = 1
"""Raised when the meaning of an entry changes; entries of other formats are misses."""

ANSWER_BYTES = 2**20
"""The most that an answer's entry may have; they have a few thousand."""

PACK_BYTES = 2**31
"""The most that a pack may have: four times what is downloaded by default."""

_PACK_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


def default_cache_dir() -> Path:
    """The platform's folder for caches; `GEMMSMITH_CACHE_DIR` overrides it."""
    if chosen := os.environ.get("GEMMSMITH_CACHE_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = xdg_folder("XDG_CACHE_HOME", ".cache")
    return base / "gemmsmith"


def open_entry(path: Path, most: int) -> BufferedReader:
    """Open a file of a cache for reading.

    Raises:
        OSError: there is no such file, it has more than `most` bytes, or it is a link, a pipe, a
            device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not an entry of a cache", str(path))
    return os.fdopen(descriptor, "rb")


class _Key(msgspec.Struct, frozen=True):
    url: str
    problem: Problem
    device: str | None
    arch: str | None
    exact: bool

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:40]


class Entry(msgspec.Struct, frozen=True):
    """A cached answer, and the ETag it came with."""

    format: int
    key: _Key
    etag: str | None
    answer: Answer


class Cache:
    """Remembers nothing: `cache_dir=None`. No method of a cache raises for a broken disk."""

    def load(self, query: Query) -> Entry | None:  # noqa: ARG002
        """The last known answer, or None."""
        return None

    def store(self, query: Query, answer: Answer, etag: str | None) -> None:
        """Remember an answer."""

    def drop(self, query: Query) -> None:
        """Forget what the service no longer stands for."""


class AnswerCache(Cache):
    """One file per question under `root`, for one service URL."""

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.url = url
        self._complained = False

    def _key(self, query: Query) -> _Key:
        return _Key(self.url, query.problem, query.device, query.arch, query.exact)

    def _path(self, key: _Key) -> Path:
        digest = key.digest()
        return self.root / "answers" / digest[:2] / f"{digest[2:]}.json"

    def load(self, query: Query) -> Entry | None:
        """The last known answer; an unreadable or foreign entry counts as none."""
        key = self._key(query)
        try:
            with open_entry(self._path(key), ANSWER_BYTES) as file:
                entry = understood.decode(file.read(), Entry)
        except (
            OSError,
            msgspec.DecodeError,
            understood.NotKnownHere,
            InvalidProblem,
            RecursionError,  # a list in a list in a list …
        ):
            return None
        is_own = entry.key == key and entry.answer.problem == query.problem
        return entry if is_own and entry.format == FORMAT else None

    def store(self, query: Query, answer: Answer, etag: str | None) -> None:
        """Remember an answer; a full or read-only disk is logged once and otherwise ignored."""
        key = self._key(query)
        data = msgspec.json.encode(Entry(FORMAT, key, etag, answer))
        try:
            publish(self._path(key), data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("answers are not cached: %s: %s", self.root, error.strerror)

    def drop(self, query: Query) -> None:
        with contextlib.suppress(OSError):
            self._path(self._key(query)).unlink(missing_ok=True)


class PackCache:
    """Downloaded kernel packs. A pack's name is the SHA-256 of its bytes, so each proves itself."""

    def __init__(self, root: Path) -> None:
        self.root = root / "packs"

    def path(self, pack_hash: str) -> Path:
        """Where a pack lies once it is here; raises ValueError if it is not a pack's hash."""
        if not _PACK_HASH.fullmatch(pack_hash):
            raise ValueError(f"not a pack hash (64 hexadecimal digits): {pack_hash!r}")
        return self.root / f"{pack_hash}.so"

    def find(self, pack_hash: str) -> Path | None:
        """The pack if it is here and whole; damaged bytes are a miss.

        Raises:
            PackError: others may write to it or to the folder.
        """
        path = self.path(pack_hash)
        try:
            with open_entry(path, PACK_BYTES) as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
            reason = unsafe(self.root) or unsafe(path)
        except OSError:
            return None
        if reason:
            raise PackError(f"pack {pack_hash[:16]}… is not run: {reason}")
        return path if actual == pack_hash else None

    def store(self, pack_hash: str, content: bytes) -> Path:
        """Check the downloaded bytes and keep them.

        Raises:
            PackCorrupt: the bytes are not those of this pack.
            OSError: the cache folder cannot be written to.
        """
        path = self.path(pack_hash)
        actual = hashlib.sha256(content).hexdigest()
        if actual != pack_hash:
            raise PackCorrupt(
                f"pack {pack_hash[:16]}… arrived as {len(content)} bytes with SHA-256 "
                f"{actual[:16]}…: truncated or altered on its way; download it again"
            )
        publish(path, content, durable=True)
        return path
