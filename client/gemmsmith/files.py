"""The folders of a user, and atomic writes.

`publish` writes gemmsmith's own files, in private folders. `replacing` and `write` write to a path
that a user names: a file, a link, a pipe, a device or an open descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

STDOUT = 1
"""The descriptor of standard output."""

_MOST_LINKS = 40
"""Linux's limit: a longer chain of links is considered a loop."""

_UNREAD_S = 30
"""Seconds that the reader of a named pipe may take before it begins to read."""


def xdg_folder(variable: str, default: str, environ: Mapping[str, str] | None = None) -> Path:
    """A base folder of the XDG specification, such as `XDG_DATA_HOME`. It may not exist yet.

    `default` is the folder's path below the user's home. As the specification requires, a relative
    path in the variable is ignored: it would depend on the working folder.
    """
    values = os.environ if environ is None else environ
    folder = Path(values.get(variable, ""))
    return folder if folder.is_absolute() else Path.home() / default


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    return xdg_folder("XDG_DATA_HOME", ".local/share", environ) / "gemmsmith"


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents so that only their owner can enter them.

    Existing folders are unchanged. Raises OSError if a folder cannot be made.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def unsafe(path: Path) -> str | None:
    """Why code or keys at `path`, a file or a folder, must not be used: other users may change it.

    Returns None if only this user and root may change it. The reason names a command to fix it.

    Raises:
        OSError: there is no such file or folder, or it is not accessible.
    """
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return (
            f"{path} belongs to another user ({status.st_uid}): chown it to {os.geteuid()}, or "
            "name another place"
        )
    if status.st_mode & _OTHERS_WRITE:
        return f"other users may write to {path}: chmod go-w {shlex.quote(str(path))}"
    return None


def publish(
    path: Path,
    data: bytes,
    *,
    durable: bool = False,
    shared: bool = False,
    aside: str | None = None,
) -> None:
    """Write a temporary file, then rename it: readers see the old file or the complete new file.

    Args:
        path: the file's path. If its folder is missing, it is made private.
        data: the whole content.
        durable: wait until the content and the name are on disk.
        shared: readable by everyone who can enter the folder; otherwise by the owner only.
        aside: prefix of the temporary file's name, to find those that killed processes left behind.

    Raises:
        OSError: no space, or no permission. The temporary file is removed.
    """
    private_folder(path.parent)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=aside or f".{path.name}.")
    except OSError as error:
        # Name the path that the caller knows instead of the random name.
        raise OSError(error.errno, error.strerror, str(path)) from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if shared:
            temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        _sync(path.parent)


def write(path: Path, data: bytes) -> None:
    with replacing(path) as aside:
        aside.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file, whose content goes to `path` when the block ends.

    If `path` is a file, it is replaced atomically and keeps its mode. A pipe, a device or an open
    descriptor (`/dev/stdout`, `/dev/fd/3`) is written to. Links are followed. If anything fails
    before the content is complete, `path` is unchanged.

    Raises:
        OSError: no space, no permission, or `path` is a folder; names `path`.
    """
    with _naming(path):
        target = _followed(path)
        beside = None
        if not is_stream(path):
            beside = target.parent
            beside.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=beside, prefix=f".{path.name[:100]}.")
    with temporary as folder:
        aside = Path(folder, "new")
        try:
            yield aside
        except OSError as error:
            if error.errno is None or error.filename not in (None, str(aside)):
                raise
            raise OSError(error.errno, error.strerror, str(path)) from error
        with _naming(path):
            if beside is None:
                _pour(aside, target)
            else:
                _put(aside, target)


def is_stream(path: Path) -> bool:
    """Whether `path` names a pipe, a device or an open descriptor, which is never replaced.

    Raises:
        OSError: it names a folder, or is not accessible.
    """
    target = _followed(path)
    if _descriptor(target) is not None:
        return True
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return not stat.S_ISREG(mode)


def descriptor(path: Path) -> int | None:
    """The number of an open descriptor of this process, if `path` names it: 3 for `/dev/fd/3`.

    Raises:
        OSError: `path` is a loop of links.
    """
    return _descriptor(_followed(path))


def read_text(path: Path) -> str:
    """The text of a file that a user has written, without a byte-order mark.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("the text is not UTF-8: save it in that encoding") from None


@contextmanager
def turn(folder: Path, *, patience_s: float, exclusive: bool = True) -> Iterator[None]:
    """Hold the lock of a folder during the block. After `patience_s` seconds, run without it.

    Any user who can read the folder can hold its lock, and a network file system may have no
    locks. So the block must be correct without the lock, too; it may only be slower.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    operation = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the file system has no locks
                break
            else:
                break
        yield
    finally:
        os.close(handle)  # releases the lock


def _followed(path: Path) -> Path:
    """Follows links, but stops at the entry of an open descriptor."""
    # Such an entry is a link as well. It may lead to a file, if a shell has redirected output to
    # it, but output must go to the descriptor, at its current position.
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)  # resolve() raises for loops
        if _descriptor(path) is not None or not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _descriptor(followed: Path) -> int | None:
    """The number of this process's open descriptor; None if the path is something else."""
    tasks = f"/proc/{os.getpid()}"
    folder, name = str(followed.parent), followed.name
    mine = folder in ("/dev/fd", f"{tasks}/fd") or fnmatch(folder, f"{tasks}/task/*/fd")
    return int(name) if mine and name.isdecimal() else None


def _put(aside: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        aside.chmod(stat.S_IMODE(target.stat().st_mode))
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(target)
    _sync(target.parent)


def _pour(aside: Path, target: Path) -> None:
    own = _descriptor(target)
    with aside.open("rb") as file:
        if own == STDOUT and hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()  # keeps the order of earlier output
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.flush()
            return
        number = os.open(target, os.O_WRONLY | os.O_NOCTTY) if own is None else own
        with os.fdopen(number, "wb", closefd=own is None) as stream:
            if own is None and target.is_fifo():
                _fill(file, number)
            else:
                shutil.copyfileobj(file, stream)


def _fill(file: BinaryIO, pipe: int) -> None:
    """Write to a named pipe, at the reader's pace; give up if nothing is ever read."""
    os.set_blocking(pipe, False)
    waiting, written = select.poll(), 0
    waiting.register(pipe, select.POLLOUT)
    while piece := memoryview(file.read(2**16)):
        while piece:
            if not waiting.poll(1000 * _UNREAD_S):
                # The pipe is full. If it still holds all that was written, its reader never began.
                unread = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
                if unread == written:
                    raise TimeoutError(errno.ETIMEDOUT, "nothing is read from this pipe")
                continue
            count = os.write(pipe, piece)
            written, piece = written + count, piece[count:]


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes system errors in the block name the path that the user knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
