"""Changes the database's clock, which is the only clock that leases depend on.

SQLite uses the machine's clock through `julianday('now')`: `install` replaces this function by one
that adds the seconds in a file. A PostgreSQL server has a single clock for all clients: a
`clock_timestamp` in a schema that is searched first adds the seconds in a table.
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
    """Let every SQLite connection of this process use the clock that the environment names."""
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
    """The clock of a database. Processes that use SQLite need the variables in `environ`."""

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
        """Set the clock's error to this number of seconds."""
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
