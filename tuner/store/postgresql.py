"""PostgreSQL's own programs, for what only they can do: dump a database and put a dump back.

The password goes to them in the environment, never on their command line, which others can see.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.engine import URL

from tuner.errors import DatabaseCorrupt, DatabaseInUse, StoreError
from tuner.store.database import Database
from tuner.store.models import Base

_SESSION_END_S = 2.0
"""Our own sessions of a moment ago may take so long to be gone."""

_VERSION_TABLE = "alembic_version"
_REVISION = re.compile(
    rb"^COPY \S*alembic_version \(version_num\) FROM stdin;\n(\w+)\n", re.MULTILINE
)


def dump(url: URL, target: Path) -> None:
    """Write the database to `target` in `pg_dump`'s custom format, and see that it reads back.

    Raises:
        StoreError: the program is missing, or what it said.
    """
    _run(["pg_dump", "--format=custom", f"--file={target}", _address(url)], url)
    _run(["pg_restore", "--file=/dev/null", str(target)])


@contextmanager
def unpacked(source: Path) -> Iterator[tuple[str, Path]]:
    """A dump's schema revision, and a file with the SQL that makes it, for the time of the block.

    Raises:
        DatabaseCorrupt: `source` is no dump of gemmsmith's database, or damaged.
        StoreError: the program is missing.
    """
    _program("pg_restore")
    with tempfile.TemporaryDirectory(prefix="gemmsmith-") as folder:
        script = Path(folder) / "restore.sql"
        unpack = ["pg_restore", "--no-owner", "--no-privileges"]
        try:
            _run([*unpack, f"--file={script}", str(source)])
            version = _run(
                [*unpack, "--data-only", f"--table={_VERSION_TABLE}", "--file=-", str(source)]
            )
        except StoreError as error:
            raise DatabaseCorrupt(f"{source} is no usable backup: {error}") from error
        found = _REVISION.search(version)
        if found is None:
            raise DatabaseCorrupt(f"{source} is no backup of gemmsmith's: it names no schema")
        yield found[1].decode(), script


def replace(url: URL, script: Path) -> None:
    """Replace gemmsmith's tables by what `script` makes, in one transaction.

    Raises:
        DatabaseInUse: other sessions are open; nothing was changed.
        StoreError: the program is missing, or what it said; nothing was changed.
    """
    _program("psql")
    with closing(Database(url.render_as_string(hide_password=False))) as database:
        deadline = time.monotonic() + _SESSION_END_S
        while others := _others(database):
            if time.monotonic() > deadline:
                raise DatabaseInUse(
                    f"{url.database} is in use from {', '.join(others)}: stop the service, its "
                    "workers and every other session first"
                )
            time.sleep(0.1)
    names = ", ".join([*Base.metadata.tables, _VERSION_TABLE])
    psql = ["psql", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1"]
    drop = f"--command=DROP TABLE IF EXISTS {names} CASCADE"
    _run([*psql, drop, f"--file={script}", _address(url)], url)


def _others(database: Database) -> list[str]:
    """Where sessions other than ours come from."""
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
    found = shutil.which(name)
    if found is None:
        raise StoreError(f"{name} is not installed: apt-get install postgresql-client")
    return found


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
