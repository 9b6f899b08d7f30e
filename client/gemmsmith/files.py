"""Where files of a user lie, and publishing one whole: the one way in which anything here writes
what others may be reading.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of what is kept for this user, as the XDG base directory specification has it.

    A relative `XDG_DATA_HOME` does not count, as it says. The folder may not be there yet.
    """
    values = os.environ if environ is None else environ
    data = Path(values.get("XDG_DATA_HOME", ""))
    return (data if data.is_absolute() else Path.home() / ".local" / "share") / "gemmsmith"


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and those above it too; what is there stays.

    Raises:
        OSError: it cannot be made.
    """
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


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
        path: where readers look; its folder is made if need be.
        data: the whole content.
        durable: on disk, its name too, when this returns.
        shared: readable by everyone; else by the owner only.
        aside: prefix of the file written aside, for whoever clears up after killed processes.

    Raises:
        OSError: no space, no permission; nothing of it stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
