"""A disk fills up while jobs are tuned: the packs' one, and the database's."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from gemmsmith.core.tuning import JobState
from service.http.readiness import FRESH_S
from tests.support import postgresql
from tests.support.disk import Disk, small_disk
from tests.support.fleet import Fleet
from tests.support.ledger import verify, verify_packs
from tests.support.orders import Reader, accepted, distinct_orders, is_busy, lookup
from tests.support.processes import until
from tests.support.records import imported
from tests.support.shipped import recorded_problems, shipped_winners
from tuner.jobs import Queue
from tuner.store import Store

ORDERS = 8


@pytest.mark.long
def test_the_packs_disk(store: Store, store_url: str, tmp_path: Path, random: Random) -> None:
    imported(store, shipped_winners()[0])
    queue = Queue(store)
    order, other = distinct_orders(2, random)
    with (
        small_disk(160) as disk,
        Fleet(
            store_url,
            tmp_path,
            GEMMSMITH_TEST_NVCC=str(tmp_path / "nvcc"),
            GEMMSMITH_PACKS=str(disk.folder / "packs"),
        ) as fleet,
    ):
        fleet.serve(worker=True)
        fleet.wait_until_up()
        assert fleet.client.get("/readyz").json()["status"] == "ok"
        disk.fill()
        job = accepted(fleet.client, order, "first")
        with Reader(fleet.url, recorded_problems()) as reader:
            until(lambda: _requeued(queue, job), "the worker does not notice")
            time.sleep(FRESH_S)
            checks = fleet.client.get("/readyz").json()
        assert checks["status"] == "degraded"
        assert "0 MB are left for packs" in checks["checks"]["packs"]
        assert reader.wrong == []
        packs = disk.folder / "packs"
        assert {path for path in packs.iterdir() if path.suffix == ".so"} == set()
        disk.free()
        jobs = [job, accepted(fleet.client, other, "second")]
        fleet.wait_until_idle()
        assert fleet.client.get("/readyz").json()["status"] == "ok"
        assert verify(store_url, jobs) == {"done": 2}
        fleet.kill(fleet.processes())
        verify_packs(store_url, packs)


def _requeued(queue: Queue, job: str) -> bool:
    said = [event.data["error"] for event in queue.events(job) if event.kind == "requeued"]
    assert all("no space left for a" in error for error in said), said
    return bool(said)


@contextmanager
def database_on(disk: Disk, kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A store that lies on the disk: a SQLite file, or a tablespace of the PostgreSQL server."""
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), disk.folder / "store.db")
        yield f"sqlite:///{disk.folder}/store.db"
        return
    server = request.getfixturevalue("postgresql_server")
    template = request.getfixturevalue("postgresql_template")
    name = f"full_{uuid.uuid4().hex}"
    place = disk.folder / "tablespace"
    place.mkdir()
    postgresql.give(place)
    postgresql.administer(server, f"CREATE TABLESPACE {name} LOCATION '{place}'")
    copied = f'CREATE DATABASE {name} TEMPLATE "{template}" TABLESPACE {name}'
    postgresql.administer(server, copied)
    try:
        yield f"{server}/{name}"
    finally:
        postgresql.administer(server, f"DROP DATABASE {name} WITH (FORCE)")
        postgresql.administer(server, f"DROP TABLESPACE {name}")


@pytest.mark.long
def test_the_databases_disk(
    database_kind: str, request: pytest.FixtureRequest, tmp_path: Path, random: Random
) -> None:
    orders = iter(distinct_orders(136, random))
    with (
        small_disk(64) as disk,
        database_on(disk, database_kind, request) as url,
        Fleet(url, tmp_path, GEMMSMITH_TEST_PAUSE_S="0.05") as fleet,
    ):
        with Store.open(url) as store:
            imported(store, shipped_winners()[0])
        fleet.serve(worker=True)
        fleet.wait_until_up()
        jobs = [accepted(fleet.client, next(orders), f"early-{n}") for n in range(ORDERS)]
        disk.fill()
        with Reader(fleet.url, recorded_problems()) as reader:
            refused = _refused(fleet.client, orders, jobs)
            time.sleep(FRESH_S)
            ready = fleet.client.get("/readyz")
            until(lambda: "no space left for" in fleet.log(), "nobody says so")
            until(lambda: reader.answers > 20, "nothing can be read")
        assert is_busy(refused)
        assert "no space left for" in refused.json()["detail"]
        if database_kind == "sqlite":  # PostgreSQL still has room for what /readyz writes
            assert is_busy(ready)
            assert "no space left for" in ready.json()["checks"]["database"]
        assert reader.wrong == []
        disk.free()
        jobs.append(accepted(fleet.client, next(orders), "late"))
        time.sleep(FRESH_S)
        assert fleet.client.get("/readyz").json()["status"] in ("ok", "degraded")
        fleet.wait_until_idle()
        jobs = [_again(fleet, url, job) for job in jobs]
        fleet.wait_until_idle()
        assert fleet.client.get(lookup(recorded_problems()[0])).status_code in (200, 404)
        fleet.kill(fleet.processes())
        assert verify(url, jobs) == {"done": len(jobs)}


def _refused(
    client: httpx.Client, orders: Iterator[dict[str, object]], jobs: list[str]
) -> httpx.Response:
    """The answer to the first order that finds no room; what is left in pages is used before."""
    for order in orders:
        reply = client.post("/tune", json=order)
        if reply.status_code != 202:
            return reply
        jobs.append(reply.json()["id"])
    raise AssertionError("a full disk holds any number of orders")


def _again(fleet: Fleet, url: str, job: str) -> str:
    """The job, or the one that tries it once more if it has failed for lack of space."""
    with Store.open(url) as store:
        reply = Queue(store).get(job)
    if reply.state is JobState.DONE:
        return job
    assert "no space left for" in str(reply.error)
    return str(fleet.client.post(f"/jobs/{job}/retry").json()["id"])
