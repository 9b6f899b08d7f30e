"""Whether a database can be written: a write that changes nothing."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import text

from tuner.store.database import Database

PATIENCE_S = 2.0
"""Wait for other writers, whose transactions take milliseconds."""


def probe(url: str) -> None:
    """Write a value that an upgraded database has already, durably.

    Raises:
        DatabaseBusy: other writers took longer than `PATIENCE_S`.
        StoreError: it cannot be written.
    """
    with closing(Database(url, patience_s=PATIENCE_S)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = version_num"))
