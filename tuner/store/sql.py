"""What SQLite and PostgreSQL spell differently: the time, and INSERT … ON CONFLICT DO NOTHING.

The clock is the database's own, so that machines whose clocks differ agree on when a lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, cast

from sqlalchemy import ClauseElement, ColumnElement, Double, Row, Table, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.functions import FunctionElement

from tuner.store.models import Base


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch, to the millisecond or finer."""

    type = Double()
    inherit_cache = True
    name = "gemmsmith_now"


@compiles(now, "sqlite")
def _sqlite(_element: now, _compiler: SQLCompiler, **_: Any) -> str:
    # unixepoch('subsec') needs SQLite 3.42; a Julian day as a double resolves 40 microseconds.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql(_element: now, _compiler: SQLCompiler, **_: Any) -> str:
    # Not now(): that stands still within a transaction, which may have waited for a lock.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def moment(session: Session) -> float:
    return session.scalars(select(now())).one()


def equal(
    *pairs: tuple[ColumnElement[Any] | InstrumentedAttribute[Any], object],
) -> list[ColumnElement[bool]]:
    """The conditions that columns have these values; without those whose value is None."""
    return [
        column == (value.value if isinstance(value, Enum) else value)
        for column, value in pairs
        if value is not None
    ]


def insert_ignore(session: Session, table: type[Base], values: dict[str, Any]) -> int | None:
    """Insert a row unless a unique constraint forbids it; its id, or None if the row exists.

    On PostgreSQL this waits for a transaction that is inserting the same row, so that a SELECT
    afterwards sees that row.
    """
    # Plain values go in as parameters: written into the statement, they would cost three times as
    # much as the insertion.
    computed = {name: value for name, value in values.items() if isinstance(value, ClauseElement)}
    parameters = {name: value for name, value in values.items() if name not in computed}
    statement = _insert(session, table, computed, ())
    row_id: Any = session.execute(statement, parameters).scalar_one_or_none()
    return row_id if isinstance(row_id, int) else None


def insert_new(
    session: Session,
    table: type[Base],
    rows: Sequence[dict[str, Any]],
    returning: Sequence[str],
    **computed: ClauseElement,
) -> Sequence[Row[Any]]:
    """Insert those rows that no unique constraint forbids, all in one statement or a few.

    Each of them gets what is `computed` as well.

    Returns:
        For each inserted row, in any order, its id and the columns in `returning`.
    """
    statement = _insert(session, table, computed, returning)
    # On the connection: a session would make an object of each row first.
    return session.connection().execute(statement, list(rows)).all()


def _insert(
    session: Session,
    table: type[Base],
    computed: Mapping[str, ClauseElement],
    returning: Sequence[str],
) -> ReturningInsert[Any]:
    """The statement; it returns the new rows' ids and the columns in `returning`."""
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    insert = sqlite.insert if on_sqlite else postgresql.insert
    into = cast(Table, table.__table__)
    statement = insert(into).values(**computed).on_conflict_do_nothing()
    columns = [into.columns[name] for name in returning]
    return statement.returning(inspect(table).primary_key[0], *columns)
