"""Back to an older schema, which only tests ask for."""

from __future__ import annotations

from contextlib import closing

from alembic import command

from tuner.store.database import Database
from tuner.store.schema import config_of


def downgrade(url: str, revision: str) -> None:
    with closing(Database(url, migrating=True)) as database, database.connect() as connection:
        command.downgrade(config_of(connection), revision)
