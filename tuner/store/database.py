"""One database: how it is opened, and the two kinds of transaction made on it.

SQLite runs in WAL mode: readers never wait. `synchronous=FULL`: when a write transaction returns,
its rows survive a power cut as well as a killed process. The file must lie on a local disk: WAL
needs memory shared between the processes that use it.

A `Database` may be shared by threads. A forked child must open its own.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, TextClause, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from gemmsmith.files import private_folder
from gemmsmith.showing import address
from tuner.errors import SchemaChanged, StoreError
from tuner.extras import pip_install
from tuner.store.faults import translated

BUSY_TIMEOUT_S = 30.0
"""Longest wait for another program's transaction; ours take milliseconds. PostgreSQL itself has no
limit: a session that was left open would block us for ever."""

Fence = Callable[[Session], object]
"""Raises if the transaction that has just begun must not write."""

IDLE_IN_TRANSACTION_S = 25.0
"""PostgreSQL ends a session that is idle for so long in the middle of a write: its program hangs or
its machine is gone, and others wait for its locks. Shorter than `BUSY_TIMEOUT_S`, their wait."""

_WRITES = "gemmsmith_writes"
_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def parse_url(url: str) -> URL:
    """Read a database URL; PostgreSQL means psycopg 3.

    Raises:
        StoreError: not a URL, or neither SQLite in a file nor PostgreSQL.
    """
    shown = address(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # of which both messages may show the password
        raise StoreError(
            f"{shown!r} is no database URL; write sqlite:///path/to/file.db or "
            "postgresql://user@host:5432/name"
        ) from None
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise StoreError(f"a port must be in 1 … 65535, got {parsed.port} in {shown!r}")
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise StoreError(f"{parsed.drivername} is not supported; use SQLite or PostgreSQL")
    if parsed.get_backend_name() == "sqlite" and sqlite_path(parsed) is None:
        raise StoreError("a database in memory would be lost; write sqlite:///path/to/file.db")
    return parsed


def sqlite_path(url: URL) -> Path | None:
    """The file of a SQLite URL; None for other databases and for SQLite in memory."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def create_private(path: Path) -> None:
    """Make an empty SQLite file that only its owner can read, unless it exists.

    Raises:
        OSError: the folder or the file cannot be made.
    """
    # SQLite gives the files beside it, `-wal` and `-shm`, the same permissions. The database has
    # the names and hashes of all keys, and the audit.
    private_folder(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))


class Database:
    """An engine with the project's settings.

    Args:
        url: as `parse_url` takes it.
        migrating: do not enforce foreign keys, because SQLite tables are rebuilt.
        patience_s: longest wait for another program's transaction, and for a server that does not
            answer; by default `BUSY_TIMEOUT_S` for the first, and no limit for the second.
    """

    def __init__(
        self, url: str, *, migrating: bool = False, patience_s: float | None = None
    ) -> None:
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._migrating = migrating
        self._patience_s = patience_s
        self._revision: str | None = None
        self._first = self._first_statement()
        try:
            self._engine = self._create_engine()
        except ValueError:
            raise StoreError(f"an option of {url!r} has no usable value") from None
        self._writer = self._engine.execution_options(**{_WRITES: True})
        self._fence: Fence = lambda _: None

    def _create_engine(self) -> Engine:
        options: dict[str, Any] = {
            "json_serializer": lambda value: msgspec.json.encode(value).decode(),
            "json_deserializer": msgspec.json.decode,
            "pool_size": 8,
            "max_overflow": 40,
        }
        if not self.is_sqlite:
            options["connect_args"] = self._postgresql_settings()
            try:
                engine = create_engine(self.url, pool_pre_ping=True, **options)
            except ModuleNotFoundError as error:
                raise StoreError(
                    f"PostgreSQL needs psycopg: {pip_install('postgresql')}"
                ) from error
            return engine
        patience_s = BUSY_TIMEOUT_S if self._patience_s is None else self._patience_s
        engine = create_engine(self.url, connect_args={"timeout": patience_s}, **options)
        event.listen(engine, "connect", self._set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _postgresql_settings(self) -> dict[str, Any]:
        if self._patience_s is None and self._migrating:
            return {}  # waits for another migration, however long that takes
        patience_s = BUSY_TIMEOUT_S if self._patience_s is None else self._patience_s
        options = self.url.query.get("options", "")
        limit = f"-c lock_timeout={int(patience_s * 1000)}"
        settings: dict[str, Any] = {"options": f"{options} {limit}".strip()}
        if self._patience_s is not None:
            settings["connect_timeout"] = max(2, int(self._patience_s))  # libpq's minimum
        return settings

    def _set_up_sqlite(self, connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # `_begin_sqlite` begins transactions, not sqlite3
        connection.execute(f"PRAGMA foreign_keys = {'OFF' if self._migrating else 'ON'}")
        # One fsync a commit, of 0.2 ms to a few ms: little compared with a trial.
        connection.execute("PRAGMA synchronous = FULL")
        _enter_wal(connection)

    def fenced(self, fence: Fence) -> Database:
        """The same database and connections; every `write` of it begins with the fence.

        An error that the fence raises ends the transaction, and nothing is written.
        """
        other = copy(self)  # shares the engine, and so its connections
        other._fence = fence
        return other

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state and never waits; its changes are dropped."""
        with translated(self.url), Session(self._engine) as session:
            yield session

    @contextmanager
    def glance(self) -> Iterator[Connection]:
        # A session takes longer to make than a few small queries.
        with translated(self.url), self._engine.connect() as connection:
            yield connection

    def expect(self, revision: str) -> None:
        """Write from now on only while the schema is this: the database may be migrated."""
        self._revision = revision
        self._first = self._first_statement()

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose changes are durable when the block ends, or none of them made.

        Raises:
            SchemaChanged, DiskFull, DatabaseCorrupt, StoreError: nothing was changed.
        """
        with (
            translated(self.url),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            self._begin(session.connection())
            self._fence(session)
            yield session

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A plain connection inside a write transaction, for migrations."""
        with translated(self.url), self._writer.begin() as connection:
            self._begin(connection)
            yield connection

    def lock(self, session: Session | Connection, name: int) -> None:
        """Let one write transaction at a time pass here, until it ends.

        SQLite has a single writer anyhow; PostgreSQL takes an advisory lock with that number.
        """
        if not self.is_sqlite:
            session.execute(text("SELECT pg_advisory_xact_lock(:name)"), {"name": name})

    def close(self) -> None:
        self._engine.dispose()

    def _first_statement(self) -> TextClause | None:
        """The first statement of each write: limits PostgreSQL's wait, and reads the revision."""
        # One statement does both, as a worker waits for its result once for each trial.
        values = []
        if not self.is_sqlite and not self._migrating:
            limit = f"'{IDLE_IN_TRANSACTION_S * 1000:.0f}'"
            values.append(f"set_config('idle_in_transaction_session_timeout', {limit}, true)")
        if self._revision is not None:
            values.append("(SELECT version_num FROM alembic_version)")
        return text(f"SELECT {', '.join(values)}") if values else None

    def _begin(self, connection: Connection) -> None:
        if self._first is None:
            return
        revision = connection.execute(self._first).one()[-1]
        if self._revision is not None and revision != self._revision:
            raise SchemaChanged(
                f"the database was migrated from schema {self._revision} to {revision} while this "
                "program had it open, and nothing was changed. Restart it with the gemmsmith that "
                "migrated the database"
            )


def _begin_sqlite(connection: Connection) -> None:
    # A writer waits for its turn (up to `BUSY_TIMEOUT_S`) before it has read anything, and never
    # fails half way because another one was first.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_WRITES, False))


def _enter_wal(connection: sqlite3.Connection) -> None:
    # The mode is stored in the file, and SQLite does not wait for the lock that setting it needs:
    # programs that open a new database at the same moment must try again.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
