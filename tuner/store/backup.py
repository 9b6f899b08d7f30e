"""Backups of the database, made and restored whole or not at all.

SQLite: SQLite's online backup, which sees one moment and stops no writer, into one file that is a
database itself. PostgreSQL: `pg_dump`'s custom format. A backup is checked before it gets its name,
and again before it is restored.

Restoring replaces everything. It refuses while another process has the database open: SQLite's
locks and PostgreSQL's list of sessions show that, and a service keeps a session as long as it runs.
An older backup is upgraded in a copy first; then one transaction replaces the content, so that a
crash at any point leaves the old content or the new one.

A backup comes from elsewhere. From a PostgreSQL dump only rows are restored, into tables that our
own migrations make (`tuner.store.postgresql`). A SQLite file is restored as it is, if its schema is
exactly that of the migrations.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import func, inspect, select, table

from gemmsmith.files import is_stream, private_folder, replacing
from tuner.errors import DatabaseCorrupt, DatabaseInUse, StoreError
from tuner.store import postgresql, schema
from tuner.store.database import Database, create_private, parse_url, sqlite_path
from tuner.store.faults import translated


def backup(url: str, target: Path) -> str:
    """Write the database's present content to `target`; its schema's revision.

    `target` is a new file, or a pipe or a device.

    Raises:
        StoreError: the database does not exist, `target` exists or cannot be written, or
            PostgreSQL's programs are missing; no file is left.
        DatabaseCorrupt: the copy does not pass the check, so the database is damaged.
        DiskFull: no file is left.
    """
    parsed = parse_url(url)
    revision = schema.current(url)
    if revision is None:
        raise StoreError(f"there is nothing to back up at {parsed.render_as_string()}")
    if target.exists() and not is_stream(target):
        raise StoreError(f"{target} exists already; name a new file")
    with replacing(target) as copy:
        copy.touch(mode=0o600)
        source = sqlite_path(parsed)
        if source is None:
            postgresql.dump(parsed, copy)
        else:
            with translated(parsed):
                _copy_sqlite(source, copy)
            _check_sqlite(copy, source)
    return revision


def restore(url: str, source: Path, *, force: bool = False) -> str:
    """Replace the database's content by that of the backup `source`; its schema's new revision.

    With `force` even if the database is not empty. A damaged SQLite file is then kept beside the
    new one, under a name that ends in `.damaged-` and the Unix time.

    Raises:
        DatabaseCorrupt: `source` is not a backup, is damaged, or has another schema than the
            migrations make; nothing was changed.
        DatabaseInUse: another process has the database open; nothing was changed.
        SchemaTooNew: a newer gemmsmith made the backup; nothing was changed.
        StoreError: the database is not empty, without `force`; nothing was changed.
    """
    parsed = parse_url(url)
    if not source.is_file():
        raise StoreError(f"there is no backup at {source}")
    target = sqlite_path(parsed)
    if target is None:
        with postgresql.unpacked(source) as dump:
            if not force:
                _refuse_content(url)
            return postgresql.replace(parsed, dump)
    private_folder(target.parent)
    with _aside(target.parent) as copy, translated(parsed):
        try:
            _copy_sqlite(source, copy)
        except sqlite3.DatabaseError as error:
            raise DatabaseCorrupt(f"{source} is no usable backup ({error})") from error
        _check_schema(copy, source)
        _check_sqlite(copy, source)
        with schema.upgrading_rows_of(source):
            revision = schema.upgrade(f"sqlite:///{copy}")
        with closing(sqlite3.connect(copy)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        if not force:
            _refuse_content(url)
        elif _is_damaged(url):
            _set_aside(target)
        create_private(target)
        _replace_sqlite(target, copy)
    return revision


def _refuse_content(url: str) -> None:
    try:
        if schema.current(url) is None:
            return
    except DatabaseCorrupt as error:
        raise DatabaseCorrupt(f"{error} Restoring with --force moves it aside.") from error
    with closing(Database(url)) as database, database.read() as session:
        names = set(inspect(session.connection()).get_table_names()) - {"alembic_version"}
        numbers = {
            name: session.scalar(select(func.count()).select_from(table(name)))
            for name in sorted(names)
        }
    held = ", ".join(f"{number} {name}" for name, number in numbers.items() if number)
    if held:
        raise StoreError(
            f"the database is not empty ({held}): back it up, then use --force to replace it"
        )


def _is_damaged(url: str) -> bool:
    try:
        schema.current(url)
    except DatabaseCorrupt:
        return True
    return False


def _copy_sqlite(source: Path, target: Path) -> None:
    with (
        closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as reading,
        closing(sqlite3.connect(target)) as writing,
    ):
        # All in one step: in several, each write of another process would start it anew.
        reading.backup(writing)
        writing.execute("PRAGMA journal_mode = DELETE")  # one file, no -wal beside it


def _check_schema(copy: Path, source: Path) -> None:
    """Refuse a schema that differs from that of the migrations, before any part of it is used."""
    try:
        # A trigger in the file would act on every later write.
        actual, revisions = _schema_in(copy)
    except sqlite3.DatabaseError as error:
        raise DatabaseCorrupt(f"{source} is no usable backup ({error})") from error
    revision = schema.only_known(revisions, str(source))
    with tempfile.TemporaryDirectory(prefix="gemmsmith-") as folder:
        made = Path(folder) / "made.db"
        schema.upgrade(f"sqlite:///{made}", revision)
        expected, _ = _schema_in(made)
    for name in sorted(actual.keys() | expected.keys()):
        if actual.get(name) != expected.get(name):
            raise DatabaseCorrupt(
                f"{source} lacks the {name}"
                if name not in actual
                else f"{source} has the {name}, which no gemmsmith makes"
                if name not in expected
                else f"the {name} in {source} differs from the one that gemmsmith makes"
            )


def _schema_in(path: Path) -> tuple[dict[str, str], list[str]]:
    """Definitions of tables, indexes, triggers and views by kind and name; Alembic's revisions."""
    query = (
        "SELECT type || ' ' || name, coalesce(sql, '') FROM sqlite_master "
        # Without those that SQLite makes itself: for constraints, counters and statistics.
        "WHERE NOT (type = 'index' AND name LIKE 'sqlite_autoindex_%' AND sql IS NULL) AND NOT "
        "(type = 'table' AND name IN ('sqlite_sequence', 'sqlite_stat1', 'sqlite_stat4'))"
    )
    with closing(sqlite3.connect(path)) as connection:
        objects = {name: " ".join(sql.split()) for name, sql in connection.execute(query)}
        if "table alembic_version" not in objects:
            return objects, []
        versions = connection.execute("SELECT version_num FROM alembic_version LIMIT 3")
        return objects, [str(version) for (version,) in versions]


def _check_sqlite(copy: Path, source: Path) -> None:
    with closing(sqlite3.connect(copy)) as connection:
        try:
            said = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
            orphans = connection.execute("PRAGMA foreign_key_check").fetchone()
        except sqlite3.DatabaseError as error:
            said, orphans = [str(error)], None
    if said != ["ok"] or orphans:
        fault = f"row {orphans[1]} of {orphans[0]} refers to nothing" if orphans else said[0]
        raise DatabaseCorrupt(f"{source} is damaged ({fault}); nothing was written or changed")


def _replace_sqlite(target: Path, copy: Path) -> None:
    with (
        closing(sqlite3.connect(target, timeout=0)) as writing,
        closing(sqlite3.connect(copy)) as reading,
    ):
        try:
            # Leaving WAL needs exclusive access to the file; the lock is then kept to the end.
            writing.execute("PRAGMA locking_mode = EXCLUSIVE")
            writing.execute("PRAGMA journal_mode = DELETE")
            writing.execute("BEGIN EXCLUSIVE")
            writing.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            raise DatabaseInUse(
                f"{target} is open in another process: stop the service, its workers and every "
                "gemmsmith command first"
            ) from error
        # One transaction of SQLite's: after a crash the file is the old one or the new one.
        reading.backup(writing)


def _set_aside(damaged: Path) -> None:
    ending = f".damaged-{int(time.time())}"
    for kind in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            damaged.with_name(damaged.name + kind).rename(
                damaged.with_name(damaged.name + ending + kind)
            )


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A temporary file in `folder` that only the owner can read; it is removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".aside-")
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
