"""PostgreSQL's own programs, which alone can dump a database and restore a dump.

The password goes to them in the environment, never on their command line, which others can see.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, MetaData, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ProgrammingError

from tuner.errors import DatabaseCorrupt, DatabaseInUse, StoreError
from tuner.store import schema
from tuner.store.database import Database
from tuner.store.models import Base

_SESSION_END_S = 2.0
"""Time that our own sessions, just closed, may take to disappear."""

_VERSION_TABLE = "alembic_version"
_PIECE = 2**20

_COPY = re.compile(rb"COPY (?:\w+\.)?(\w+) \(([\w\", ]+)\) FROM stdin;\n")
_SETVAL = re.compile(
    rb"SELECT (?:pg_catalog\.)?setval\('(?:\w+\.)?(\w+)', ([0-9]{1,18}), (true|false)\);\n"
)
_ENTRY = re.compile(r"[0-9]+; [0-9]+ [0-9]+ ([A-Z][A-Z ]*[A-Z]) ")
"""A line of `pg_restore --list`, with the kind of an entry of the dump."""

_PLAIN_KINDS = frozenset({
    "ACL", "COMMENT", "CONSTRAINT", "DATABASE", "DEFAULT", "DEFAULT ACL", "ENCODING", "EXTENSION",
    "FK CONSTRAINT", "INDEX", "SCHEMA", "SEARCHPATH", "SEQUENCE", "SEQUENCE OWNED BY",
    "SEQUENCE SET", "STDSTRINGS", "TABLE", "TABLE DATA",
})  # fmt: skip
"""Kinds that a dump of gemmsmith's database may have; an administrator makes some of them."""


def dump(url: URL, target: Path) -> None:
    """Write the database to `target` in `pg_dump`'s custom format, and check that it reads back.

    Raises:
        StoreError: the program is missing, or failed.
    """
    _run(["pg_dump", "--format=custom", f"--file={target}", _address(url)], url)
    _run(["pg_restore", "--file=/dev/null", str(target)])


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpedRows:
    """A table's rows in a script, as PostgreSQL's COPY has them: `length` bytes from `start`."""

    columns: tuple[str, ...]
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """The parts of a dump that are restored: rows and sequences. None of its SQL is run.

    Attributes:
        source: the dump, for messages.
        script: a file that holds the rows.
        sequences: last value of each, and whether that was used.
    """

    source: Path
    script: Path
    revision: str
    tables: Mapping[str, DumpedRows]
    sequences: Mapping[str, tuple[int, bool]]


@contextmanager
def unpacked(source: Path) -> Iterator[Dump]:
    """A dump, readable for the time of the block.

    Raises:
        DatabaseCorrupt: `source` is not a dump of gemmsmith's database, is damaged, or has objects
            that gemmsmith does not make.
        SchemaTooNew: a newer gemmsmith made it.
        StoreError: the program is missing.
    """
    _program("pg_restore")
    with tempfile.TemporaryDirectory(prefix="gemmsmith-") as folder:
        script = Path(folder) / "rows.sql"
        try:
            listed = _run(["pg_restore", "--list", str(source)])
            _run(["pg_restore", "--data-only", "--no-owner", f"--file={script}", str(source)])
        except StoreError as error:
            raise DatabaseCorrupt(f"{source} is no usable backup: {error}") from error
        for entry in listed.decode(errors="replace").splitlines():
            kind = _ENTRY.match(entry)
            if kind is not None and kind[1] not in _PLAIN_KINDS:
                raise DatabaseCorrupt(f"{source} has a {kind[1].lower()}, which no gemmsmith makes")
        yield _read(source, script)


def _read(source: Path, script: Path) -> Dump:
    tables: dict[str, DumpedRows] = {}
    sequences: dict[str, tuple[int, bool]] = {}
    revisions: list[str] = []
    with script.open("rb") as file:
        for line in iter(file.readline, b""):
            if setval := _SETVAL.fullmatch(line):
                sequences[setval[1].decode()] = int(setval[2]), setval[3] == b"true"
            if not (copy := _COPY.fullmatch(line)):
                continue
            name, start = copy[1].decode(), file.tell()
            columns = tuple(column.strip(' "') for column in copy[2].decode().split(","))
            length = 0
            for row in iter(file.readline, b"\\.\n"):
                if not row:
                    raise DatabaseCorrupt(f"{source} ends within the rows of {name}")
                if name == _VERSION_TABLE:
                    revisions.append(row.decode(errors="replace").strip())
                length += len(row)
            if name in tables:
                raise DatabaseCorrupt(f"{source} has two tables {name}")
            tables[name] = DumpedRows(columns=columns, start=start, length=length)
    return Dump(
        source=source,
        script=script,
        revision=schema.only_known(revisions, str(source)),
        tables=tables,
        sequences=sequences,
    )


def replace(url: URL, dump: Dump) -> str:
    """Replace gemmsmith's tables, in one transaction, by those of its migrations with the dump's
    rows.

    Returns:
        The revision reached, which is the newest.

    Raises:
        DatabaseInUse: other sessions are open; nothing was changed.
        DatabaseCorrupt: the dump lacks tables or columns, has others, or its rows do not fit;
            nothing was changed.
        StoreError: the server refuses it; nothing was changed.
    """
    address = url.render_as_string(hide_password=False)
    with closing(Database(address, migrating=True)) as database:
        deadline = time.monotonic() + _SESSION_END_S
        while others := _others(database):
            if time.monotonic() > deadline:
                raise DatabaseInUse(
                    f"{url.database} is in use from {', '.join(others)}: stop the service, its "
                    "workers and every other session first"
                )
            time.sleep(0.1)
        with _permitted(dump.source), database.connect() as connection:
            schema.lock(database, connection)
            names = ", ".join([*Base.metadata.tables, _VERSION_TABLE])
            connection.execute(text(f"DROP TABLE IF EXISTS {names} CASCADE"))
            before = {*inspect(connection).get_table_names(), _VERSION_TABLE}
            schema.migrate(connection, dump.revision)
            made = MetaData()
            made.reflect(connection, only=lambda name, _: name not in before)
            _compare(dump, made)
            _fill(connection, dump, made)
            with schema.upgrading_rows_of(dump.source):
                return schema.migrate(connection)


@contextmanager
def _permitted(source: Path) -> Iterator[None]:
    """Raise a `StoreError` if the server does not let this user make or drop tables."""
    try:
        yield
    except ProgrammingError as error:
        said = str(error.orig).splitlines()[0]
        raise StoreError(f"{source} cannot be restored: {said}; nothing was changed") from error


def _compare(dump: Dump, made: MetaData) -> None:
    """Refuse a dump with other tables or columns than the migrations have made."""
    missing = made.tables.keys() - dump.tables.keys()
    unknown = dump.tables.keys() - made.tables.keys() - {_VERSION_TABLE}
    if missing:
        raise DatabaseCorrupt(f"{dump.source} lacks the table {min(missing)}")
    if unknown:
        raise DatabaseCorrupt(
            f"{dump.source} has the table {min(unknown)}, which no gemmsmith makes"
        )
    for name, table in made.tables.items():
        if set(dump.tables[name].columns) != {column.name for column in table.columns}:
            raise DatabaseCorrupt(
                f"the table {name} in {dump.source} differs from the one that gemmsmith makes"
            )


def _fill(connection: Connection, dump: Dump, made: MetaData) -> None:
    """Copy the dump's rows into the tables, which are empty."""
    import psycopg

    quote = connection.dialect.identifier_preparer.quote
    cursor = connection.connection.cursor()
    with dump.script.open("rb") as file:
        for table in made.sorted_tables:
            rows = dump.tables[table.name]
            columns = ", ".join(map(quote, rows.columns))
            file.seek(rows.start)
            try:
                with cursor.copy(f"COPY {quote(table.name)} ({columns}) FROM STDIN") as copy:
                    for done in range(0, rows.length, _PIECE):
                        copy.write(file.read(min(_PIECE, rows.length - done)))
            except psycopg.Error as error:
                said = str(error).splitlines()[0]
                if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
                    raise DatabaseCorrupt(
                        f"{dump.source} has a row in {table.name} that does not fit: {said}"
                    ) from error
                raise StoreError(f"{dump.source} cannot be restored: {said}") from error
    for name in inspect(connection).get_sequence_names():
        if name in dump.sequences:
            value, is_used = dump.sequences[name]
            connection.execute(
                text("SELECT setval(CAST(:name AS regclass), :value, :is_used)"),
                {"name": name, "value": value, "is_used": is_used},
            )


def _others(database: Database) -> list[str]:
    """The hosts of all sessions but ours."""
    query = (
        "SELECT DISTINCT coalesce(host(client_addr), 'here') FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    with database.read() as session:
        return [*session.scalars(text(query))]


def _address(url: URL) -> str:
    return url.set(drivername="postgresql", password=None).render_as_string()


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise StoreError(f"{name} is not installed: apt-get install postgresql-client")
    return path


def _run(command: list[str], url: URL | None = None) -> bytes:
    password = {"PGPASSWORD": str(url.password)} if url is not None and url.password else {}
    done = subprocess.run(
        [_program(command[0]), *command[1:]],
        env={**os.environ, **password},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise StoreError(f"{command[0]} failed: {said[-1] if said else done.returncode}")
    return done.stdout
