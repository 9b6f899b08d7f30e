"""INSERT … ON CONFLICT DO NOTHING, for SQLite and for PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import ClauseElement, Row, Table, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningInsert

from tuner.store.models import Base


def insert_ignore(session: Session, table: type[Base], values: dict[str, Any]) -> int | None:
    """Insert a row unless a unique constraint forbids it; its id, or None if it was there.

    On PostgreSQL this waits for a transaction that is inserting the same row, so that a SELECT
    afterwards sees that one's row.
    """
    # What is no expression goes in as parameters: written into the statement, values would cost
    # three times as much as the insertion.
    computed = {name: value for name, value in values.items() if isinstance(value, ClauseElement)}
    given = {name: value for name, value in values.items() if name not in computed}
    statement = _insert(session, table, computed, ())
    row: Any = session.execute(statement, given).scalar_one_or_none()
    return row if isinstance(row, int) else None


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
    """The statement, which returns the new rows' ids and those columns."""
    on_sqlite = session.get_bind().dialect.name == "sqlite"
    insert = sqlite.insert if on_sqlite else postgresql.insert
    into = cast(Table, table.__table__)
    statement = insert(into).values(**computed).on_conflict_do_nothing()
    columns = [into.columns[name] for name in returning]
    return statement.returning(inspect(table).primary_key[0], *columns)
