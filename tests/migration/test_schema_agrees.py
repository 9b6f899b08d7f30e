"""The migrations make exactly the tables that the models describe, on both databases."""

from __future__ import annotations

from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from tests.support.migrating import downgrade
from tuner.store import upgrade
from tuner.store.database import Database
from tuner.store.models import Base
from tuner.store.schema import MIGRATIONS, known_revisions


def test_files_are_named_by_their_revisions() -> None:
    scripts = [*ScriptDirectory(MIGRATIONS).walk_revisions()]
    assert [script.revision for script in reversed(scripts)] == [*known_revisions()]


def test_models_and_migrations_agree(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    database = Database(empty_database_url)
    with database.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        differences: list[Any] = compare_metadata(context, Base.metadata)
    database.close()
    assert differences == []


def test_partial_indexes_and_constraint_names_are_as_in_the_models(empty_database_url: str) -> None:
    """What the comparison above does not look at."""
    upgrade(empty_database_url)
    database = Database(empty_database_url)
    with database.connect() as connection:
        inspector = inspect(connection)
        unique = {index["name"]: index for index in inspector.get_indexes("winners")}
        current = unique["uq_winners_current"]
        assert current["unique"]
        (condition,) = (
            value for name, value in current["dialect_options"].items() if name.endswith("_where")
        )
        assert "is_current" in str(condition)
        for table in Base.metadata.tables.values():
            named = {key["name"] for key in inspector.get_foreign_keys(table.name)}
            assert named == {key.name for key in table.foreign_key_constraints}
    database.close()


def test_a_downgrade_leaves_nothing_behind(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    downgrade(empty_database_url, "base")
    database = Database(empty_database_url)
    with database.connect() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
        assert connection.scalar(text("SELECT count(*) FROM alembic_version")) == 0
    database.close()
