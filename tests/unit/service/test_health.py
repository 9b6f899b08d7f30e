"""`/healthz` and `/readyz`, on databases and folders that are really broken."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from gemmsmith.core.problem import Problem
from service.cli import checks
from service.http import readiness
from service.http.access import Scope
from tests.support.processes import address, serving, until
from tests.support.queries import statements
from tests.support.serving import new_settings, promote, running, winner
from tuner.errors import SchemaChanged
from tuner.store import Store, head
from tuner.store.database import Database
from tuner.store.schema import probe


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer of `/readyz` is a new look."""
    monkeypatch.setattr(readiness, "FRESH_S", 0)


def test_all_is_well(tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        reply = client.get("/readyz")
        assert reply.status_code == 200
        assert reply.json() == {
            "status": "ok",
            "schema": head(),
            "checks": {"database": "ok", "schema": "ok", "packs": "ok"},
        }


def test_a_probe_leaves_a_database_as_it_is(store_url: str) -> None:
    probe(store_url)
    probe(store_url)


@pytest.mark.usefixtures("at_once")
def test_without_room_for_packs_it_is_degraded_but_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = new_settings(tmp_path)
    with running(settings) as client:
        monkeypatch.setattr(readiness, "PACKS_NEED_BYTES", 10**18)
        full = client.get("/readyz")
        found = {check.name: check for check in checks.run(settings, str(client.base_url))}
        assert found["service"].status is checks.CheckStatus.WARNING
        assert "MB are left" in found["service"].detail
        shutil.rmtree(settings.packs)
        missing = client.get("/readyz")
    for reply, said in ((full, "MB are left"), (missing, "is missing")):
        assert reply.status_code == 200
        assert reply.json()["status"] == "degraded"
        assert said in reply.json()["checks"]["packs"]


@pytest.mark.usefixtures("at_once")
def test_while_others_write_for_long_it_is_degraded_but_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.store.schema.PROBE_S", 0.1)
    settings = new_settings(tmp_path)
    path = settings.database.removeprefix("sqlite:///")
    with running(settings) as client, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        reply = client.get("/readyz")
        other.rollback()
        assert reply.status_code == 200
        assert "busy" in reply.json()["checks"]["database"]
        assert client.get("/readyz").json()["status"] == "ok"


def test_a_database_that_cannot_be_read_is_not_ready(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    with running(settings) as client:
        for path in tmp_path.glob("gemmsmith.db*"):
            path.write_bytes(b"not a database at all" * 1000)
        for path in ("/results", "/readyz"):
            reply = client.get(path)
            assert reply.status_code == 503
            assert reply.headers["content-type"] == "application/problem+json"
            assert reply.json()["type"] == "urn:gemmsmith:problem:store-unavailable"
            assert (reply.json()["status"], bool(reply.json()["title"])) == (503, True)
        assert "Restore a backup" in reply.json()["checks"]["database"]
        assert client.get("/healthz").status_code == 200


@pytest.mark.long
def test_a_database_that_cannot_be_written_is_not_ready(tmp_path: Path) -> None:
    order = {"m": 64, "n": 64, "k": 64}
    with (
        serving(tmp_path) as (process, banner),
        httpx.Client(base_url=address(banner), timeout=30) as client,
    ):

        def ready() -> httpx.Response:
            time.sleep(readiness.FRESH_S)
            return client.get("/readyz")

        assert ready().json()["status"] == "ok"
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[1]))  # a full disk
        assert client.post("/tune", json=order).status_code == 503
        reply = ready()  # an order has failed, so it is tried at once
        assert reply.status_code == 503
        checks = reply.json()["checks"]
        assert checks["schema"] == "ok"
        assert "gemmsmith.db" in checks["database"]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
        assert ready().status_code == 200


def test_asking_often_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "FRESH_S", 0.5)
    settings = new_settings(tmp_path)
    with running(settings) as client, statements("alembic_version") as looks:
        began = time.monotonic()
        for _ in range(200):
            assert client.get("/readyz").json()["status"] == "ok"
        took = time.monotonic() - began
    writes = [statement for statement in looks if statement.startswith("UPDATE")]
    assert len(writes) == 1
    assert len(looks) - len(writes) <= 4 * (took / readiness.FRESH_S + 1)


def test_while_a_look_takes_long_it_is_not_ready_and_nobody_waits_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.2)
    hung = threading.Event()
    settings = new_settings(tmp_path)
    with running(settings) as client:
        monkeypatch.setattr(readiness, "probe", lambda _: hung.wait(20))
        for _ in range(2):
            began = time.monotonic()
            reply = client.get("/readyz")
            assert time.monotonic() - began < 5
            assert reply.status_code == 503
            assert "has not answered for" in reply.json()["checks"]["database"]
        hung.set()
        until(lambda: client.get("/readyz").status_code == 200, "it does not come back")


@pytest.mark.usefixtures("at_once")
def test_strangers_are_told_neither_paths_nor_hosts_nor_users(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, require_keys=True)
    with Store.open(settings.database) as store:
        _, secret = store.keys.create("ann", Scope.READ)
    bearer = {"Authorization": f"Bearer {secret}"}
    with running(settings) as client:
        for path in tmp_path.glob("gemmsmith.db*"):
            path.write_bytes(b"not a database at all" * 1000)
        for headers in ({}, {"Authorization": "Bearer gsk_wrong"}):
            reply = client.get("/readyz", headers=headers)
            assert reply.status_code == 503
            assert "log says why" in reply.json()["checks"]["database"]
            assert str(tmp_path) not in reply.text
            assert "gemmsmith.db" not in reply.text
        assert "Restore a backup" in client.get("/readyz", headers=bearer).text


@pytest.mark.usefixtures("at_once")
def test_a_service_whose_database_was_migrated_reads_and_writes_nothing(
    store_url: str, tmp_path: Path
) -> None:
    """By a newer program, or back to an older one's schema."""
    asked = {"m": 64, "n": 64, "k": 64}
    settings = new_settings(tmp_path, database=store_url)
    promote(settings, winner(Problem(**asked)))
    with running(settings) as client, Store.open(store_url) as worker:
        for found in ("9999", "0001"):
            set_schema(store_url, found)
            refused = client.post("/tune", json={**asked, "m": 128})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["type"].endswith("schema-mismatch")
            assert f"to {found} while this program had it open" in refused.json()["detail"]
            with pytest.raises(SchemaChanged, match=found):
                worker.promote(winner(Problem(m=1, n=1, k=1)))
            ready = client.get("/readyz")
            assert ready.status_code == 503
            assert "db upgrade" in ready.json()["detail"]
            assert client.get("/healthz").status_code == 200
            assert client.get("/best", params=asked).json()["match"] == "exact"
        set_schema(store_url, head())
        assert client.get("/readyz").status_code == 200
        assert client.get("/jobs").json()["jobs"] == []
        assert client.post("/tune", json={**asked, "m": 128}).status_code == 202


def set_schema(url: str, revision: str) -> None:
    with closing(Database(url)) as database, database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
