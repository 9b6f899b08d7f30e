"""Which process holds a lock on a file, for messages about a lock that takes too long to get.

Linux lists all file locks in `/proc/locks`, with their processes, so that locking itself needs no
bookkeeping. On other systems, and for processes in other containers, the holder is unknown.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LONGEST = 120  # characters of a command line


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a lock.

    Attributes:
        command: its command line, shortened; empty if it cannot be read.
        stopped: whether it is stopped, by SIGSTOP or Ctrl-Z, so that it cannot release the lock.
        user: id of its user; None if unknown.
    """

    pid: int
    user: int | None
    command: str
    stopped: bool

    def __str__(self) -> str:
        command = f" ({self.command})" if self.command else ""
        return f"process {self.pid}{command}{', which is stopped,' if self.stopped else ''}"


def holder(path: Path, *, byte: int = 0) -> Holder | None:
    """The visible process, if any, with an exclusive lock on the file, or on that byte of it.

    A lock on the whole file (flock) counts as one on byte 0.
    """
    try:
        status = path.stat()
        lines = (_PROC / "locks").read_text().splitlines()
    except OSError:
        return None
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        # "1: POSIX  ADVISORY  WRITE 30583 fe:00:2654483 120 120"; with "->" one that waits.
        fields = line.split()
        if len(fields) != 8 or fields[3] != "WRITE" or fields[5] != where:
            continue
        first, last = int(fields[6]), fields[7]
        if first <= byte and (last == "EOF" or byte <= int(last)):
            return _described(int(fields[4]))
    return None


def _described(pid: int) -> Holder | None:
    if pid <= 0:  # a process of another container, or the kernel's own lock
        return None
    user = None
    try:
        user = (_PROC / str(pid)).stat().st_uid
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        # "30583 (python) T 1 …": the name may contain spaces and brackets, so split behind it.
        state = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the process has ended, or is not visible to us
        return Holder(pid=pid, user=user, command="", stopped=False)
    command, stopped = shlex.join(words.split("\0")[:-1]), state[0] == "T"
    if len(command) > _LONGEST:
        command = command[: _LONGEST - 1] + "…"
    return Holder(pid=pid, user=user, command=command, stopped=stopped)
