"""The database's schema: the revision it has, the one this program needs, and upgrading it.

The migrations are in `migrations/`, in the project's root or in the wheel (`tuner.places`),
whatever the working folder. A migration's file begins with its revision, so that the revisions are
known without Alembic: importing it and all migrations is a third of the time of a command.

An upgrade is one transaction on both databases: it happens wholly or not at all. Of several
programs that start at once one upgrades and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DataError, IntegrityError

from tuner import places
from tuner.errors import DatabaseCorrupt, SchemaOutdated, SchemaTooNew, StoreError
from tuner.store.database import Database, create_private, parse_url, sqlite_path

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = places.shipped("migrations")

PROBE_S = 2.0
"""A probe's wait for other writers, whose transactions take milliseconds."""

_UPGRADE_LOCK = 0x67656D6D  # any number that no other lock of ours has


@cache
def known_revisions() -> tuple[str, ...]:
    """The revisions that this program knows, oldest first."""
    names = sorted(path.name.split("_")[0] for path in MIGRATIONS.glob("versions/[0-9]*.py"))
    if not names:
        raise StoreError(f"no migrations at {MIGRATIONS}: install gemmsmith again")
    return tuple(names)


def head() -> str:
    """The revision that this program works with."""
    return known_revisions()[-1]


def current(url: str, patience_s: float | None = None) -> str | None:
    """The revision a database has; None if it does not exist or is empty.

    `patience_s` is as for `Database`.
    """
    path = sqlite_path(parse_url(url))
    if path is not None and not path.exists():
        return None
    with closing(Database(url, patience_s=patience_s)) as database:
        return _current(database)


def upgrade(url: str, revision: str = "head") -> str:
    """Create the database if it does not exist, and upgrade it to `revision`; safe to repeat.

    Returns:
        The revision the database has now.

    Raises:
        SchemaTooNew: a newer program wrote it; nothing was changed.
        DatabaseCorrupt, DiskFull, StoreError: nothing was changed.
    """
    path = sqlite_path(parse_url(url))
    if path is not None:
        try:
            create_private(path)
        except OSError as error:
            raise StoreError(
                f"cannot create the folder {path.parent}, or {path.name} in it: {error.strerror}. "
                "Name another place: --database, GEMMSMITH_DATABASE"
            ) from error
    with closing(Database(url, migrating=True)) as database, database.connect() as connection:
        lock(database, connection)
        before = _revision(connection)
        _refuse_newer(before, str(database.url))
        reached = migrate(connection, revision)
        if reached != before:  # with a million winners the check takes a second
            _check_foreign_keys(database, connection)
    return reached


def migrate(connection: Connection, revision: str = "head") -> str:
    """Run the migrations up to `revision` in the connection's transaction; the revision reached."""
    from alembic import command

    command.upgrade(config_of(connection), revision)
    reached = _revision(connection)
    if reached is None:
        raise StoreError(f"the migration to {revision} left no revision behind")
    return reached


def config_of(connection: Connection) -> Config:
    """Alembic's settings, to run migrations in the connection's transaction."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


@contextmanager
def upgrading_rows_of(source: Path) -> Iterator[None]:
    """While an older backup is upgraded: its rows may be such as no migration expects.

    Raises:
        DatabaseCorrupt: such a row exists.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, DataError, IntegrityError) as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise DatabaseCorrupt(
            f"{source} has rows that cannot be upgraded ({type(error).__name__}: {said})"
        ) from error


def probe(url: str) -> None:
    """Write a value that an upgraded database has already, durably: whether it can be written.

    Raises:
        DatabaseBusy: other writers took longer than `PROBE_S`.
        StoreError: it cannot be written.
    """
    with closing(Database(url, patience_s=PROBE_S)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = version_num"))


def lock(database: Database, connection: Connection) -> None:
    """Wait until no other program upgrades the database; holds until the transaction ends."""
    database.lock(connection, _UPGRADE_LOCK)


def check(database: Database) -> None:
    """Refuse a database that this program cannot work with.

    Raises:
        SchemaOutdated: older, or empty; the message has the command that upgrades it.
        SchemaTooNew: written by a newer program.
        DatabaseCorrupt: not a database.
    """
    revision, needed = _current(database), head()
    if revision == needed:
        database.expect(needed)
        return
    where = str(database.url)  # without its password
    _refuse_newer(revision, where)
    has = f"has schema {revision}, this gemmsmith needs {needed}" if revision else "is empty"
    raise SchemaOutdated(f"{where} {has}. Run: gemmsmith db upgrade --database {where}")


def only_known(revisions: Sequence[str], where: str) -> str:
    """The one revision that a backup names, if this program can upgrade it.

    Raises:
        DatabaseCorrupt, SchemaTooNew: naming `where`.
    """
    if len(revisions) != 1:
        named = ", ".join(sorted(revisions)) or "none"
        raise DatabaseCorrupt(f"{where} is no backup of gemmsmith's: it names as schema {named}")
    _refuse_newer(revisions[0], where)
    return revisions[0]


def is_known(revision: str | None) -> bool:
    """Whether this program can upgrade a database at that revision; None is an empty one."""
    return revision in (None, *known_revisions())


def _refuse_newer(revision: str | None, where: str) -> None:
    if not is_known(revision):
        raise SchemaTooNew(
            f"{where} has schema {revision}, which this gemmsmith (schema {head()}) does not know: "
            "a newer gemmsmith wrote it. Run that one, put back a backup from before its upgrade "
            "(`gemmsmith db restore FILE --force`), or use another database."
        )


def _current(database: Database) -> str | None:
    with database.read() as session:
        return _revision(session.connection())


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revisions = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
    if len(revisions) > 1:
        raise DatabaseCorrupt(
            f"{connection.engine.url} names {len(revisions)} schemas "
            f"({', '.join(sorted(map(str, revisions)))}), where one is possible. Restore a backup."
        )
    return str(revisions[0]) if revisions else None


def _check_foreign_keys(database: Database, connection: Connection) -> None:
    if database.is_sqlite and connection.execute(text("PRAGMA foreign_key_check")).first():
        raise DatabaseCorrupt(
            f"{database.url} has rows that refer to missing ones; the upgrade was undone. "
            "Restore a backup."
        )
