"""Where files of a user lie, and how files are written.

`publish` writes what gemmsmith keeps for itself, in private folders. `replacing` and `write` write
what a user names: a file, a link, a pipe, a device or an open descriptor.
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
"""Of Linux: a longer chain of links is a loop."""

_UNREAD_S = 30
"""How long a reader of a named pipe may take to begin."""


def xdg_folder(variable: str, default: str, environ: Mapping[str, str] | None = None) -> Path:
    """A base folder of the XDG specification, such as `XDG_DATA_HOME`. It may not be there yet.

    A relative path does not count, as the specification says: it would be another folder in every
    working folder. `default` is the folder's path below the user's home.
    """
    values = os.environ if environ is None else environ
    folder = Path(values.get(variable, ""))
    return folder if folder.is_absolute() else Path.home() / default


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of what is kept for this user. It may not be there yet."""
    return xdg_folder("XDG_DATA_HOME", ".local/share", environ) / "gemmsmith"


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and those above it too; what is there stays.

    Raises:
        OSError: it cannot be made.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def unsafe(path: Path) -> str | None:
    """Why code or keys at `path`, a file or a folder, are not used: others may change them.

    Returns None if only this user and root may. The reason names the command that mends it.

    Raises:
        OSError: there is no such file or folder, or it cannot be seen.
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
    """Write aside, then rename: readers see the old file, none, or all of the new one.

    Args:
        path: where readers look; its folder is made private if it is missing.
        data: the whole content.
        durable: on disk, its name too, when this returns.
        shared: readable by everyone who can enter the folder; else by the owner only.
        aside: prefix of the file written aside, for removing what killed processes left.

    Raises:
        OSError: no space, no permission; nothing of it stays behind.
    """
    private_folder(path.parent)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=aside or f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the random name
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
    """Write a file that a user has named; see `replacing`."""
    with replacing(path) as aside:
        aside.write_bytes(data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file; when the block ends, its content goes to what `path` names.

    A file there is replaced in one step and keeps its mode. A pipe, a device or an open descriptor
    (`/dev/stdout`, `/dev/fd/3`) is written to. Links are followed. If anything fails before the
    content is complete, what is there stays as it was.

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
        OSError: it names a folder, or cannot be seen.
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
    """Hold the lock of a folder, if it can be had in time; else the block runs without it.

    Any user who can read the folder can hold its lock, and a network file system may have no
    locks. So the block must be right without the lock too, if slower.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
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
    """Where links lead, up to the entry of an open descriptor: that one leads to no name.

    What a shell redirects to a file has a name, but the file must be written where it stands.
    """
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)  # resolve() raises for loops
        if _descriptor(path) is not None or not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _descriptor(followed: Path) -> int | None:
    """The number of this process's open descriptor; None if the path names something else."""
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
            sys.stdout.flush()  # what was printed before comes before
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
    """Write to a named pipe, at the reader's pace; give up if its reader never reads at all."""
    os.set_blocking(pipe, False)
    waiting, written = select.poll(), 0
    waiting.register(pipe, select.POLLOUT)
    while piece := memoryview(file.read(2**16)):
        while piece:
            if not waiting.poll(1000 * _UNREAD_S):
                unread = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
                if unread == written:
                    raise TimeoutError(errno.ETIMEDOUT, "nothing is read from this pipe")
                continue
            count = os.write(pipe, piece)
            written, piece = written + count, piece[count:]


def _sync(folder: Path) -> None:
    """Put the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Within it, errors of the system name the path that the user knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
