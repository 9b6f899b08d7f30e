"""Databases that cannot be used: each says what to do, and loses nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event, text

from tests.support.records import DEVICE, PROBLEM, trial, winner
from tuner.errors import (
    DatabaseBusy,
    DatabaseCorrupt,
    DiskFull,
    SchemaOutdated,
    SchemaTooNew,
    StoreError,
)
from tuner.jobs import Queue
from tuner.store import Store, current, head, upgrade
from tuner.store.database import BUSY_TIMEOUT_S, IDLE_IN_TRANSACTION_S, Database


def test_a_new_database_is_created_and_creating_it_again_changes_nothing(
    empty_database_url: str,
) -> None:
    assert current(empty_database_url) is None
    with Store.open(empty_database_url, create=True) as store:
        store.add_trial(trial())
    assert current(empty_database_url) == head()
    assert upgrade(empty_database_url) == head()
    with Store.open(empty_database_url, create=True) as store:
        assert store.counts()["trials"] == 1


def test_an_empty_database_is_outdated(empty_database_url: str) -> None:
    with pytest.raises(SchemaOutdated, match="gemmsmith db upgrade"):
        Store.open(empty_database_url)


def test_looking_for_a_missing_file_does_not_make_one(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(SchemaOutdated, match=r"no database at .*none\.db"):
        Store.open(f"sqlite:///{path}")
    assert current(f"sqlite:///{path}") is None
    assert not path.exists()


def test_folders_are_made_for_a_new_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a/b/store.db"
    assert upgrade(url) == head()
    Store.open(url).close()


def test_migrations_are_found_from_any_folder(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    program = "from tuner.store import upgrade; print(upgrade('sqlite:///here.db'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == head()
    assert (tmp_path / "here.db").exists()


def test_a_newer_database_is_refused_and_left_alone(store_url: str) -> None:
    database = Database(store_url)
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(SchemaTooNew, match="newer gemmsmith"):
        Store.open(store_url)
    with pytest.raises(SchemaTooNew, match="9999"):
        upgrade(store_url)
    assert current(store_url) == "9999"


@pytest.mark.parametrize("content", [b"not a database, but long enough " * 300, b"SQLite format 3"])
def test_a_file_that_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.db"
    path.write_bytes(content)
    for attempt in (Store.open, current, upgrade):
        with pytest.raises(DatabaseCorrupt, match="Restore a backup"):
            attempt(f"sqlite:///{path}")
    assert path.read_bytes() == content


def test_a_damaged_database(sqlite_url: str) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    with Store.open(sqlite_url) as store:
        store.add_trials([trial(n) for n in range(200)])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: 4096 * 2] + b"\x55" * (len(whole) - 4096 * 2))
    with pytest.raises(DatabaseCorrupt), Store.open(sqlite_url) as store:
        store.trials()


def test_a_database_that_was_emptied_under_a_running_program(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as other:
            other.execute("DROP TABLE trials")
        with pytest.raises(DatabaseCorrupt, match="no such table"):
            store.trials()


def test_a_full_disk_loses_only_the_change_at_hand(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        store.add_trial(trial(0))

        @event.listens_for(store.database._engine, "checkout")
        def no_more_pages(connection: sqlite3.Connection, *_: object) -> None:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages}")

        with pytest.raises(DiskFull, match="free some space"):
            store.add_trials([trial(n) for n in range(1, 2000)])
        assert [stored.trial for stored in store.trials()] == [trial(0)]
        event.remove(store.database._engine, "checkout", no_more_pages)
        store.database.close()  # the limit belongs to the connections
        store.add_trials([trial(n) for n in range(1, 2000)])
        assert store.counts()["trials"] == 2000


@pytest.mark.postgresql
def test_a_server_that_drops_the_connection(
    postgresql_server: str, postgresql_template: str
) -> None:
    """The change at hand fails with an error of ours, and the next call connects again."""

    def cut_off(store: Store) -> None:
        with store.database.write() as session:
            backend = session.scalar(text("SELECT pg_backend_pid()"))
            administrator = Database(f"{postgresql_server}/postgres")
            with administrator.connect() as connection:
                connection.execute(text(f"SELECT pg_terminate_backend({backend})"))
            administrator.close()
            session.execute(text("DELETE FROM winners"))

    with Store.open(f"{postgresql_server}/{postgresql_template}") as store:
        with pytest.raises(StoreError, match="Check that the server runs"):
            cut_off(store)
        assert store.counts()["winners"] == 0


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(StoreError, match="Check that the server runs") as failure:
        Store.open("postgresql://someone:secret@127.0.0.1:9/none")
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://host/name", "sqlite://", "sqlite:///:memory:"]
)
def test_unusable_urls_are_refused(url: str) -> None:
    with pytest.raises(StoreError):
        Store.open(url)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the folder"):
        upgrade(f"sqlite:///{tmp_path}/file/store.db")


def test_sqlite_is_set_up_for_durable_writes_and_free_reads(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store.database.read() as session:
        settings = {
            name: session.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 2,  # FULL
        "foreign_keys": 1,
        "busy_timeout": 30_000,
    }


@pytest.mark.postgresql
def test_postgresql_does_not_wait_for_ever(
    postgresql_server: str, postgresql_template: str
) -> None:
    url = f"{postgresql_server}/{postgresql_template}"
    told = f"{url}?options=-c%20lock_timeout%3D7%20-c%20work_mem%3D1MB"
    for database in (Database(url), Database(told)):
        with database.read() as session:
            assert session.execute(text("SHOW lock_timeout")).scalar() == "30s"
        database.close()
    with closing(Database(told)) as database, database.read() as session:
        assert session.execute(text("SHOW work_mem")).scalar() == "1MB", "the URL's own stay"


def test_readers_do_not_wait_for_a_writer(store: Store) -> None:
    store.promote(winner())
    with store.database.write() as session:
        session.execute(text("DELETE FROM winners"))
        assert store.winner(PROBLEM, DEVICE.slug) is not None
    assert store.winner(PROBLEM, DEVICE.slug) is None


def test_what_raises_inside_a_transaction_undoes_it(store: Store) -> None:
    def interrupted() -> None:
        with store.database.write() as session:
            session.execute(text("DELETE FROM winners"))
            raise KeyboardInterrupt

    store.promote(winner())
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.counts()["winners"] == 1


@contextmanager
def frozen_writer(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that was stopped by SIGSTOP in the middle of a write."""
    holding = (
        "from tests.support import lock_holder; from tuner.store import database;"
        f"database.IDLE_IN_TRANSACTION_S = 0.5; lock_holder.main({url!r}, 600)"
    )
    command = [sys.executable, "-c", holding]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        try:
            yield holder
        finally:
            holder.kill()


def test_who_waits_too_long_is_told_for_whom(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, frozen_writer(sqlite_url) as holder:
        with (
            closing(Database(sqlite_url, patience_s=0.1)) as database,
            pytest.raises(DatabaseBusy) as failure,
            database.connect(),
        ):
            pass
        said = str(failure.value)
        assert f"process {holder.pid} (" in said
        assert "tests.support import lock_holder" in said
        assert "), which is stopped, holds a transaction open" in said
        assert f"`kill -9 {holder.pid}`: what it had begun is then undone" in said
        holder.kill()
        store.promote(winner())


@pytest.mark.postgresql
def test_a_server_ends_the_transaction_of_a_program_that_is_frozen(
    postgresql_server: str, postgresql_template: str
) -> None:
    url = f"{postgresql_server}/{postgresql_template}"
    limit = text("SHOW idle_in_transaction_session_timeout")
    with closing(Database(url)) as database:
        with database.write() as session:
            assert session.execute(limit).scalar() == f"{IDLE_IN_TRANSACTION_S:.0f}s"
        with database.read() as session:
            assert session.execute(limit).scalar() == "0", "reading may take long"
    assert IDLE_IN_TRANSACTION_S < BUSY_TIMEOUT_S, "or those who wait give up before"
    with Store.open(url) as store, frozen_writer(url):
        assert Queue(store).list() == []  # it had locked that table
