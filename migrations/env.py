"""Alembic's entry: runs the migrations on the connection that `tuner.store.schema` hands over.

For a developer's own `alembic` command there is no such connection; it takes `-x url=…`.
"""

from alembic import context
from sqlalchemy import Connection

from tuner import places
from tuner.store.database import Database
from tuner.store.models import Base


def _run(connection: Connection) -> None:
    # Batch mode: SQLite can alter a table only by rebuilding it.
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    database = Database(
        context.get_x_argument(as_dictionary=True).get(
            "url", f"sqlite:///{places.state()}/gemmsmith.db"
        ),
        migrating=True,
    )
    with database.connect() as own:
        _run(own)
    database.close()


_main()
