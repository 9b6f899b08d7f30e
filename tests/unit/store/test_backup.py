"""Backups: of one moment, whole or not there, and put back whole or not at all."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect, text

from tests.migration.make_asset import ASSETS
from tests.support.records import DEVICE, PROBLEM, failed_trial, trial, winner
from tuner.errors import DatabaseCorrupt, DatabaseInUse, SchemaTooNew, StoreError
from tuner.store import Store, current, head, postgresql, upgrade
from tuner.store.backup import backup, restore
from tuner.store.database import Database

TRIALS = 600


def fill(url: str) -> None:
    with Store.open(url, create=True) as store:
        store.add_trials([trial(0), trial(1), failed_trial(2)])
        store.promote(winner())


def content(url: str) -> tuple[object, ...]:
    with Store.open(url) as store:
        return store.trials(), store.winners(), store.counts()


def test_what_was_backed_up_comes_back(store_url: str, tmp_path: Path) -> None:
    fill(store_url)
    before = content(store_url)
    assert backup(store_url, tmp_path / "saved") == head()
    with Store.open(store_url) as store:
        store.add_trial(trial(3))
    with pytest.raises(StoreError, match=r"4 trials.*--force"):
        restore(store_url, tmp_path / "saved")
    assert restore(store_url, tmp_path / "saved", force=True) == head()
    assert content(store_url) == before
    with Store.open(store_url) as store:  # and it is a database to go on with
        store.add_trial(trial(4))
        assert store.winner(PROBLEM, DEVICE.slug) is not None
    assert not list(tmp_path.glob(".aside-*"))


def test_an_empty_or_missing_database_needs_no_force(
    store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    fill(store_url)
    backup(store_url, tmp_path / "saved")
    restore(empty_database_url, tmp_path / "saved")
    assert content(empty_database_url) == content(store_url)


def test_a_backup_while_another_process_writes(
    store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.writer", store_url, "0", str(TRIALS)]
    )
    backups: list[Path] = []
    while writer.poll() is None:
        backups.append(tmp_path / f"saved-{len(backups)}.db")
        backup(store_url, backups[-1])
        left = [path.name for path in tmp_path.glob(f"{backups[-1].name}*")]
        assert left == [backups[-1].name]
        time.sleep(0.05)
    assert writer.returncode == 0
    seen: list[int] = []
    for saved in backups[:: -(-len(backups) // 4)]:
        restore(empty_database_url, saved, force=True)
        with Store.open(empty_database_url) as store:
            trials = store.trials(job="writer-0")
            # One moment of the writer: all it had written until then, and nothing else.
            names = [stored.trial.candidate.kernel.name for stored in trials]
            assert names == [f"kernel_{turn}" for turn in range(len(trials))]
            assert len(trials) // 10 <= len(store.trials(job="everybody")) <= len(trials) // 10 + 1
        seen.append(len(trials))
    assert seen == sorted(seen)
    assert any(0 < number < TRIALS for number in seen)


def test_a_backup_is_its_owners_and_never_overwrites(sqlite_url: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.db"
    backup(sqlite_url, saved)
    assert saved.stat().st_mode & 0o777 == 0o600  # it holds hashes of keys
    with pytest.raises(StoreError, match="exists already"):
        backup(sqlite_url, saved)
    with pytest.raises(StoreError, match="nothing to back up"):
        backup(f"sqlite:///{tmp_path}/none.db", tmp_path / "other.db")
    assert not (tmp_path / "other.db").exists()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "page", "empty", "other"])
def test_a_damaged_backup_changes_nothing(store_url: str, tmp_path: Path, damage: str) -> None:
    fill(store_url)
    saved = tmp_path / "saved"
    backup(store_url, saved)
    good = saved.read_bytes()
    match damage:
        case "garbage":
            saved.write_bytes(b"no backup at all " * 5000)
        case "truncated":
            saved.write_bytes(good[: len(good) // 2])
        case "page":
            middle = len(good) // 2
            saved.write_bytes(good[:middle] + b"\xa5" * 6000 + good[middle + 6000 :])
        case "empty":
            saved.write_bytes(b"")
        case _:
            saved.unlink()
            with closing(sqlite3.connect(saved)) as connection:
                connection.execute("CREATE TABLE recipes (name TEXT)")
    before = content(store_url)
    with pytest.raises(DatabaseCorrupt):
        restore(store_url, saved, force=True)
    assert content(store_url) == before
    assert not list(tmp_path.glob(".aside-*"))


def test_a_backup_of_a_newer_gemmsmith_is_refused(store_url: str, tmp_path: Path) -> None:
    fill(store_url)
    before = content(store_url)
    with closing(Database(store_url)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    backup(store_url, tmp_path / "newer")
    with closing(Database(store_url)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": head()})
    with pytest.raises(SchemaTooNew, match="9999"):
        restore(store_url, tmp_path / "newer", force=True)
    assert content(store_url) == before


def test_an_older_backup_is_upgraded(
    empty_database_url: str, store_url: str, tmp_path: Path
) -> None:
    upgrade(empty_database_url, "0001")
    backup(empty_database_url, tmp_path / "older")
    fill(store_url)
    assert restore(store_url, tmp_path / "older", force=True) == head()
    assert current(store_url) == head()
    with Store.open(store_url) as store:
        assert not any(store.counts().values())
        store.add_trial(trial())


def test_a_database_in_use_is_left_alone(store_url: str, tmp_path: Path) -> None:
    fill(store_url)
    backup(store_url, tmp_path / "saved")
    with Store.open(store_url) as store:  # idle: it has read, and keeps its connection
        with pytest.raises(DatabaseInUse, match="stop the service"):
            restore(store_url, tmp_path / "saved", force=True)
        store.add_trial(trial(7))
        assert store.counts()["trials"] == 4


def test_a_damaged_database_is_kept_beside_the_restored_one(
    sqlite_url: str, tmp_path: Path
) -> None:
    fill(sqlite_url)
    before = content(sqlite_url)
    backup(sqlite_url, tmp_path / "saved.db")
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    path.write_bytes(b"what once was a database " * 1000)
    with pytest.raises(DatabaseCorrupt, match="--force"):
        restore(sqlite_url, tmp_path / "saved.db")
    restore(sqlite_url, tmp_path / "saved.db", force=True)
    assert content(sqlite_url) == before
    kept = min(path.parent.glob("*.damaged-*"))  # the first; the others are SQLite's own
    assert kept.read_bytes().startswith(b"what once was")


@pytest.mark.postgresql
def test_postgresql_without_its_programs_says_what_to_install(
    postgresql_server: str,
    postgresql_template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match=r"pg_dump is not installed.*postgresql-client"):
        backup(f"{postgresql_server}/{postgresql_template}", tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.postgresql
def test_a_password_is_on_no_command_line(
    postgresql_server: str,
    postgresql_template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = shutil.which("pg_dump")
    fake = tmp_path / "bin" / "pg_dump"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    url = postgresql_server.replace("postgres@", "postgres:open-sesame@")
    backup(f"{url}/{postgresql_template}", tmp_path / "saved")
    assert "open-sesame" not in (tmp_path / "said").read_text()


def dumped_with(url: str, saved: Path, *statements: str) -> None:
    """Change the database by the statements, and write it as `backup` would if it checked less."""
    with closing(Database(url, migrating=True)) as database:
        with database.connect() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)
        if not database.is_sqlite:
            postgresql.dump(database.url, saved)
            return
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute(f"VACUUM INTO '{saved}'")


def refused(url: str, saved: Path, message: str) -> None:
    fill(url)
    before = content(url)
    with pytest.raises((DatabaseCorrupt, SchemaTooNew), match=message) as caught:
        restore(url, saved, force=True)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(url) == before
    assert not list(saved.parent.glob(".aside-*"))


ADMIN = (
    "INSERT INTO api_keys (name, key_hash, scopes, created_at) VALUES ('eve', 'abc', 'admin', 0)"
)
TRIGGERS = {
    "sqlite": (f"CREATE TRIGGER friendly AFTER INSERT ON jobs BEGIN {ADMIN}; END",),
    "postgresql": (
        f"CREATE FUNCTION befriend() RETURNS trigger AS $$ BEGIN {ADMIN}; RETURN NEW; END $$ "
        "LANGUAGE plpgsql",
        "CREATE TRIGGER friendly AFTER INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION befriend()",
    ),
}
CHANGED = [
    (("CREATE VIEW friendly AS SELECT * FROM api_keys",), "has (a|the) view"),
    (("CREATE TABLE recipes (name TEXT)",), "has the table recipes, which no gemmsmith makes"),
    (("DROP TABLE audit",), "lacks the table audit"),
    (("DROP TABLE job_events", "DROP TABLE idempotency_keys"), "lacks the (table|index) "),
    (("ALTER TABLE api_keys RENAME TO keys",), "lacks the table api_keys"),
    (("ALTER TABLE api_keys ADD COLUMN note TEXT",), "the table api_keys in .* differs"),
    (("ALTER TABLE api_keys DROP COLUMN job_limit",), "the table api_keys in .* differs"),
    (("INSERT INTO alembic_version VALUES ('0001')",), f"names as schema 0001, {head()}"),
    (("UPDATE alembic_version SET version_num = '0001'",), "(lacks|has|differs)"),
    (("UPDATE alembic_version SET version_num = 'eve'",), "schema eve"),
    (("DELETE FROM alembic_version",), "names as schema none"),
    (("DROP TABLE alembic_version",), "names as schema none"),
]


@pytest.mark.parametrize(("statements", "message"), CHANGED)
def test_a_backup_with_another_schema_is_refused(
    store_url: str,
    empty_database_url: str,
    tmp_path: Path,
    statements: tuple[str, ...],
    message: str,
) -> None:
    dumped_with(store_url, tmp_path / "saved", *statements)
    refused(empty_database_url, tmp_path / "saved", message)


def test_a_backup_with_a_trigger_is_refused(
    database_kind: str, store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    """It would make itself an admin key at the next order."""
    dumped_with(store_url, tmp_path / "saved", *TRIGGERS[database_kind])
    refused(empty_database_url, tmp_path / "saved", "trigger|function")


def in_schema(before: str, after: str) -> tuple[str, ...]:
    """Statements that write a definition anew, as no statement of SQL can."""
    return (
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET sql = replace(sql, '{before}', '{after}')",
    )


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (("DROP INDEX ix_jobs_ordered_by",), "lacks the index ix_jobs_ordered_by"),
        (("CREATE INDEX handy ON jobs (state)",), "has the index handy, which no gemmsmith makes"),
        (
            ("DROP INDEX uq_winners_current", "CREATE INDEX uq_winners_current ON winners (id)"),
            "the index uq_winners_current in .* differs from the one that gemmsmith makes",
        ),
        (in_schema("UNIQUE (key_hash)", "UNIQUE (key_hash) ON CONFLICT REPLACE"), "table api_keys"),
        (in_schema("key_hash VARCHAR(128)", "key_hash COLLATE NOCASE"), "table api_keys"),
        (in_schema("UNIQUE (key_hash)", "UNIQUE (key_hash), CHECK (id > 0)"), "table api_keys"),
        (in_schema("CREATE TABLE", "CREATE ODDITY"), "is no usable backup"),
    ],
)
def test_a_sqlite_file_is_taken_only_with_the_very_schema(
    sqlite_url: str, tmp_path: Path, statements: tuple[str, ...], message: str
) -> None:
    saved = tmp_path / "saved"
    shutil.copy(sqlite_url.removeprefix("sqlite:///"), saved)
    with closing(sqlite3.connect(saved)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    refused(f"sqlite:///{tmp_path}/other.db", saved, message)


def test_statistics_of_the_planner_are_no_other_schema(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    dumped_with(sqlite_url, tmp_path / "saved", "ANALYZE")
    assert restore(f"sqlite:///{tmp_path}/other.db", tmp_path / "saved") == head()


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.sql")), ids=lambda asset: asset.stem)
def test_backups_of_every_release_are_taken(asset: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with closing(sqlite3.connect(saved)) as connection:
        connection.executescript(asset.read_text())
    assert restore(f"sqlite:///{tmp_path}/other.db", saved) == head()


of_postgresql = pytest.mark.parametrize(
    "database_kind",
    [pytest.param("postgresql", marks=pytest.mark.postgresql)],
    indirect=True,
)


@of_postgresql
def test_rows_that_do_not_fit_are_one_line(
    store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    """A dump can hold any text as rows: here rows that refer to missing ones."""
    fill(store_url)
    dumped_with(
        store_url,
        tmp_path / "saved",
        "ALTER TABLE winners DROP CONSTRAINT fk_winners_problem_id",
        "UPDATE winners SET problem_id = 999",
    )
    refused(empty_database_url, tmp_path / "saved", "a row in winners that does not fit")


@of_postgresql
def test_a_user_without_the_right_to_it_gets_one_line(
    store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    backup(store_url, tmp_path / "saved")
    weak = f"weak_{tmp_path.parent.name.replace('-', '_')}_{os.getpid()}"
    with closing(Database(empty_database_url)) as database, database.connect() as connection:
        connection.exec_driver_sql(f'CREATE ROLE "{weak}" LOGIN')
        connection.exec_driver_sql("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    url = empty_database_url.replace("postgres@", f"{weak}@")
    with pytest.raises(StoreError, match="cannot be restored: permission denied") as caught:
        restore(url, tmp_path / "saved")
    assert "\n" not in str(caught.value)


@of_postgresql
def test_no_sql_of_a_dump_is_run(store_url: str, empty_database_url: str, tmp_path: Path) -> None:
    """Its definitions, defaults and comments may be any text."""
    fill(store_url)
    dumped_with(
        store_url,
        tmp_path / "saved",
        "CREATE SEQUENCE odd",
        "ALTER TABLE api_keys ALTER COLUMN scopes SET DEFAULT 'admin'",
        "ALTER TABLE jobs DROP CONSTRAINT uq_jobs_public_id",
        "COMMENT ON TABLE jobs IS E'\\n\\\\! touch /tmp/odd\\n'",
    )
    restore(empty_database_url, tmp_path / "saved")
    assert content(empty_database_url) == content(store_url)
    with closing(Database(empty_database_url)) as database, database.connect() as connection:
        assert "odd" not in inspect(connection).get_sequence_names()
        scopes = inspect(connection).get_columns("api_keys")
        assert all(column["default"] != "'admin'" for column in scopes)
        assert inspect(connection).get_unique_constraints("jobs")


def test_identifiers_go_on_where_they_stood(
    store_url: str, empty_database_url: str, tmp_path: Path
) -> None:
    """Also of rows that are gone: an identifier is never used again."""
    fill(store_url)
    dumped_with(store_url, tmp_path / "saved", "DELETE FROM trials")
    restore(empty_database_url, tmp_path / "saved")
    with Store.open(empty_database_url) as store:
        store.add_trial(trial(9))
        assert [stored.id for stored in store.trials()] == [4]
