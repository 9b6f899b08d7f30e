"""Only one process measures on a GPU at any time: a file lock per GPU UUID, for all users.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends. The
file stays; it is empty, and is opened for reading only. It is in `/tmp` whatever `TMPDIR` says: all
users must use the same file. Every user of the machine can put files there, so links are not
followed, and only files that this call has made are changed.

Any user can hold the lock as long as they like, or put another file in its place. The lock only
keeps measurements from disturbing each other, so a user must not be able to block another's: if the
file cannot be locked, or another user's process holds it longer than a measurement takes, measuring
goes on without the lock, and the log says so.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tuner.errors import DeviceError
from tuner.locks import holder

_POLL_S = 0.05

_PATIENCE_S = 10.0
"""Wait before the log names the process that has the GPU: finals take seconds."""

_LONGEST_S = 900.0
"""Wait for another user's process: a sweep over all candidates of a problem takes minutes."""

_UNREADABLE_S = 1.0
"""Another user's new file cannot be read for microseconds, until its mode is set."""

_LOG = logging.getLogger(__name__)


def lock_path(gpu_uuid: str, directory: Path | None = None) -> Path:
    """The GPU's lock file, by default in the folder that all users of a machine share."""
    name = re.sub(r"[^A-Za-z0-9-]", "_", gpu_uuid) or "unknown-gpu"
    return (directory or Path("/tmp")) / f"gemmsmith-{name}.lock"  # noqa: S108 - see above


@contextmanager
def gpu_lock(gpu_uuid: str, directory: Path | None = None) -> Iterator[None]:
    """Hold the GPU's lock, once other processes have let it go."""
    path = lock_path(gpu_uuid, directory)
    descriptor = None
    try:
        descriptor = _acquire(path)
    except (DeviceError, OSError) as error:
        _LOG.warning("measuring without the GPU's lock: %s", error)
    try:
        yield
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have the descriptor too
            os.close(descriptor)


def _acquire(path: Path) -> int:
    """The descriptor of the locked file; raises DeviceError or OSError if it cannot be locked."""
    now = time.monotonic()
    warn_at, until = now + _PATIENCE_S, now + _LONGEST_S
    while True:
        descriptor = _open(path)
        with ExitStack() as closing:
            closing.callback(os.close, descriptor)
            while not _lock(descriptor):
                now, process = time.monotonic(), holder(path)
                if process is not None and process.user == os.geteuid():
                    until = now + _LONGEST_S  # this user's own process: the user can end it
                if now >= until:
                    raise DeviceError(f"{process or 'a process'} has held {path} for too long")
                if now >= warn_at:
                    warn_at = float("inf")
                    _LOG.warning("waiting for the GPU: %s holds %s", process or "?", path)
                time.sleep(_POLL_S)
            if _is_still(path, descriptor):  # else others lock another file of that name
                closing.pop_all()
                return descriptor


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
            # O_NONBLOCK: opening a named pipe would wait for a writer.
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
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise _unusable(path, "is no plain file, or has another name")


def _create(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return
    try:
        os.fchmod(descriptor, 0o644)  # despite the umask: to lock it, other users must read it
    finally:
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _unusable(path: Path, reason: str) -> DeviceError:
    try:
        owner = f"user {path.lstat().st_uid}"
    except OSError:
        owner = "an unknown user"
    return DeviceError(
        f"the GPU's lock {path} {reason}; gemmsmith makes none like that. It belongs to {owner}: "
        "ask why, and remove it as that user or as root"
    )
