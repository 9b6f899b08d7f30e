"""Turns what a database driver raises into the store's own errors, which say what to do next."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError

from tuner.errors import DatabaseBusy, DatabaseCorrupt, DiskFull, StoreError
from tuner.locks import holder

_CORRUPT = ("file is not a database", "malformed", "file is encrypted", "no such table")
_FULL = ("database or disk is full", "no space left on device")
_LOCKED = ("database is locked", "database table is locked")
_WAL_WRITE_LOCK = 120  # the byte of the -shm file that a writer locks: sqlite.org/walformat.html
_POSTGRESQL_FULL = "53100"  # disk_full
_POSTGRESQL_LOCKED = "55P03"  # lock_not_available, where lock_timeout is set
_POSTGRESQL_CORRUPT = ("XX001", "XX002")  # data_corrupted, index_corrupted


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Raise a `StoreError` for a fault of the database or of its machine.

    A violated constraint or wrong SQL is an error in this program and passes unchanged.
    """
    try:
        yield
    except DBAPIError as error:
        # No statement raised it: connecting failed, because of an unknown option in the URL, say.
        unconnected = error.statement is None and not isinstance(error, IntegrityError)
        fault = _classify(url, error.orig, unconnected or error.connection_invalidated)
        if fault is None:
            raise
        raise fault from error
    except sqlite3.Error as error:  # raised while a connection is being set up
        fault = _classify(url, error, False)
        if fault is None:
            raise
        raise fault from error


def _classify(url: URL, error: BaseException | None, disconnected: bool) -> StoreError | None:
    where = url.render_as_string(hide_password=True)
    said = str(error).strip()
    lowered = said.lower()
    state = getattr(error, "sqlstate", None)
    if any(sign in lowered for sign in _CORRUPT) or state in _POSTGRESQL_CORRUPT:
        return DatabaseCorrupt(
            f"{where} is not a usable database ({said}). Restore a backup, or move the file away "
            "and run `gemmsmith db upgrade` to start an empty one."
        )
    if any(sign in lowered for sign in _FULL) or state == _POSTGRESQL_FULL:
        return DiskFull(
            f"no space left for {where} ({said}). Nothing of this change was written; free some "
            "space and try again."
        )
    if any(sign in lowered for sign in _LOCKED) or state == _POSTGRESQL_LOCKED:
        return DatabaseBusy(f"{where} stayed locked ({said}): {_who_writes(url)}")
    if "unable to open" in lowered or "readonly database" in lowered:
        return StoreError(
            f"cannot open {where} for writing ({said}). Check that it and its folder belong to you."
        )
    if "disk i/o error" in lowered:
        return StoreError(
            f"the disk under {where} failed ({said}). Nothing of this change was written; check "
            "the disk and the system's log."
        )
    if disconnected or _is_operational(error):
        return StoreError(f"cannot use {where} ({said}). Check that the server runs, and the URL.")
    return None


def _who_writes(url: URL) -> str:
    if url.get_backend_name() == "sqlite":
        writer = holder(Path(f"{url.database}-shm"), byte=_WAL_WRITE_LOCK)
        if writer is not None and writer.pid != os.getpid():
            return (
                f"{writer} holds a transaction open. Let it go on, or end it with "
                f"`kill -9 {writer.pid}`: what it had begun is then undone."
            )
    return "another program holds a transaction open. Close it, and keep the file on a local disk."


def _is_operational(error: BaseException | None) -> bool:
    # psycopg is optional, and each of its errors is a class of its own under this one.
    return not isinstance(error, sqlite3.Error) and any(
        parent.__name__ == "OperationalError" for parent in type(error).__mro__
    )
