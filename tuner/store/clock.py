"""The database's own clock, so that machines whose clocks differ agree on when a lease ends."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


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
    """The database's time at this moment."""
    return session.scalars(select(now())).one()
