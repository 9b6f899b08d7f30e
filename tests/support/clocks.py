"""A clock that jumps: the database's own, which is the only one that leases are told by.

SQLite asks its machine, through `julianday('now')`: `install` puts one of that name in its place,
which is off by what a file says. A PostgreSQL server has one clock for all its clients: there
`clock_timestamp` of a schema that is searched first is off by what a table says.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from sqlalchemy import Engine, event, text

from tuner.store.database import Database

VARIABLE = "GEMMSMITH_TEST_CLOCK"

_POSTGRESQL = """
CREATE SCHEMA shifted;
CREATE TABLE shifted.offset_s (seconds double precision);
INSERT INTO shifted.offset_s VALUES (0);
CREATE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS
    'SELECT pg_catalog.clock_timestamp() + make_interval(secs => seconds) FROM shifted.offset_s';
"""


def install() -> None:
    """Let every SQLite connection of this process look at the clock that the environment names."""
    path = os.environ.get(VARIABLE)
    if not path:
        return

    def julianday(_now: str) -> float:
        return (time.time() + float(Path(path).read_text())) / 86400.0 + 2440587.5

    def on_connect(connection: object, _record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.create_function("julianday", 1, julianday)

    event.listen(Engine, "connect", on_connect)


class Clock:
    """The clock of one database; processes that use SQLite must be given `environ`."""

    def __init__(self, url: str, folder: Path) -> None:
        self._database = Database(url)
        self._file = folder / "clock"
        self._file.write_text("0")
        self.environ = {VARIABLE: str(self._file)}
        if self._database.is_sqlite:
            return
        with self._database.connect() as connection:
            connection.execute(text(_POSTGRESQL))
            name = self._database.url.database
            path = "shifted, pg_catalog, public"
            connection.execute(text(f'ALTER DATABASE "{name}" SET search_path = {path}'))

    def shift(self, seconds: float) -> None:
        """Put the clock off by so much, in all, from now on."""
        if self._database.is_sqlite:
            aside = self._file.with_suffix(".aside")
            aside.write_text(str(seconds))
            aside.replace(self._file)
            return
        with self._database.connect() as connection:
            update = text("UPDATE shifted.offset_s SET seconds = :seconds")
            connection.execute(update, {"seconds": seconds})

    def close(self) -> None:
        self._database.close()
