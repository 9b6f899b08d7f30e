"""One process at a time measures on a GPU: a file lock per GPU UUID.

The lock is the kernel's (flock), so it goes away with the process that holds it, however that
ends. The file stays; it is empty and its content means nothing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


def lock_directory() -> Path:
    """Where lock files lie: shared by all users of the machine."""
    return Path(tempfile.gettempdir()) / "gemmsmith-locks"


@contextmanager
def gpu_lock(gpu_uuid: str, directory: Path | None = None) -> Iterator[None]:
    """Hold the GPU's lock; waits for whoever has it."""
    directory = directory or lock_directory()
    directory.mkdir(parents=True, exist_ok=True)
    _open_to_all(directory, 0o1777)
    path = directory / f"{gpu_uuid or 'unknown-gpu'}.lock"
    descriptor = _open(path)
    try:
        _open_to_all(path, 0o666)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _open(path: Path) -> int:
    # Opened before it is created: in a folder that all may write to, Linux (fs.protected_regular)
    # refuses O_CREAT on another user's file, to root as well.
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _open_to_all(path: Path, mode: int) -> None:
    """Let other users lock too; only the owner may change the mode, and has done so."""
    if path.stat().st_uid == os.geteuid():
        path.chmod(mode)
