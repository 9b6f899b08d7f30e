"""One process at a time measures on a GPU: a file lock per GPU UUID, whichever user's it is.

The lock is the kernel's (flock), so it goes away with the process that holds it, however that
ends. The file stays; it is empty, and is opened for reading only. It lies in the folder for
temporary files, where every user of the machine can put files: no link is followed there, and
nothing is changed that this call has not made. Any user can hold the lock for as long as they like;
who waits for long says for whom.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.errors import DeviceError
from tuner.locks import holder

_POLL_S = 0.05

_PATIENCE_S = 10.0
"""Wait before the log says who has the GPU: finals take seconds."""

_UNREADABLE_S = 1.0
"""Somebody's new file cannot be read for microseconds, until its mode is set."""

_LOG = logging.getLogger(__name__)


def lock_path(gpu_uuid: str, directory: Path | None = None) -> Path:
    """The GPU's lock file, by default in the folder for temporary files that all users share."""
    name = re.sub(r"[^A-Za-z0-9-]", "_", gpu_uuid) or "unknown-gpu"
    return (directory or Path(tempfile.gettempdir())) / f"gemmsmith-{name}.lock"


@contextmanager
def gpu_lock(gpu_uuid: str, directory: Path | None = None) -> Iterator[None]:
    """Hold the GPU's lock; waits for whoever has it.

    Raises:
        DeviceError: the file is a link or not to be read, so that it excludes nobody.
    """
    path = lock_path(gpu_uuid, directory)
    descriptor = _acquire(path)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have the descriptor too
        os.close(descriptor)


def _acquire(path: Path) -> int:
    told_at = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = _open(path)
        try:
            while not _lock(descriptor):
                if time.monotonic() >= told_at:
                    told_at = float("inf")
                    _LOG.warning("waiting for the GPU: %s holds %s", holder(path) or "?", path)
                time.sleep(_POLL_S)
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed meanwhile: others lock another file by now


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int:
    deadline = time.monotonic() + _UNREADABLE_S
    while True:
        try:
            # Without waiting: a named pipe would make us.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            break
        except FileNotFoundError:
            _create(path)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise _unusable(path, "cannot be read") from None
            time.sleep(_POLL_S)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise _unusable(path, "is a symbolic link") from None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise _unusable(path, "is no plain file, or has another name")


def _create(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, 0o644)  # whatever the umask: to lock it, others must read it
    finally:
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unusable(path: Path, why: str) -> DeviceError:
    try:
        whose = f"user {path.lstat().st_uid}"
    except OSError:
        whose = "somebody"
    return DeviceError(
        f"the GPU's lock {path} {why}; gemmsmith makes none like that. It belongs to {whose}: "
        "ask why, and remove it as that user or as root"
    )
