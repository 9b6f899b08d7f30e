"""`/tune` and `/jobs`, without a worker; event streams are in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.http.jobs import JobStatus
from tests.support.serving import H200, new_settings, pages, running
from tuner.jobs import Queue
from tuner.store import Store


def order(client: httpx.Client, m: int, **fields: Any) -> httpx.Response:
    return client.post("/tune", json={"m": m, "n": 64, "k": 64, **fields})


def test_an_order_is_accepted_and_found_again(client: httpx.Client) -> None:
    reply = order(client, 101, dtype="fp16", layout="nt", effort="quick", priority=5)
    job = reply.json()
    assert reply.status_code == 202
    assert reply.headers["location"] == job["links"]["self"]["href"] == f"/jobs/{job['id']}"
    assert (job["state"], job["effort"], job["priority"]) == ("waiting", "quick", 5)
    assert job["problem"] == {
        "m": 101, "n": 64, "k": 64, "batch": 1, "dtype": "fp16", "layout": "nt",
    }  # fmt: skip
    assert job["created_at"].endswith("+00:00")
    assert job["started_at"] is None
    alone = {**job, "waits": "waits: no worker is alive; start one with gemmsmith worker"}
    assert client.get(reply.headers["location"]).json() == alone
    assert client.get("/jobs/latest").json() == alone


def test_the_same_order_joins_the_waiting_job(client: httpx.Client) -> None:
    first, second = order(client, 102), order(client, 102)
    assert (first.status_code, second.status_code) == (202, 200)
    assert first.json()["id"] == second.json()["id"]
    assert order(client, 102, effort="exhaustive").json()["id"] != first.json()["id"]
    assert order(client, 102, device=H200.slug).json()["id"] != first.json()["id"]


def test_idempotency_key_gives_the_job_even_after_its_end(client: httpx.Client) -> None:
    key = {"Idempotency-Key": "order-1"}
    body = {"m": 103, "n": 64, "k": 64}
    first = client.post("/tune", json=body, headers=key).json()
    client.delete(f"/jobs/{first['id']}")
    again = client.post("/tune", json=body, headers=key)
    assert again.status_code == 200
    assert again.json()["id"] == first["id"]
    assert client.post("/tune", json=body).json()["id"] != first["id"]
    other = client.post("/tune", json={**body, "m": 104}, headers=key)
    assert other.status_code == 422
    assert other.json()["type"].endswith(":idempotency-key-reused")
    long = client.post("/tune", json=body, headers={"Idempotency-Key": "x" * 201})
    assert long.json()["errors"][0]["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"m": 0}, "m"),
        ({"m": 1.0}, "m"),
        ({"m": "1"}, "m"),
        ({"m": True}, "m"),
        ({"m": None}, "m"),
        ({"m": 10**30}, "m"),
        ({"k": 2**31}, "k"),
        ({"batch": -1}, "batch"),
        ({"dtype": "int4"}, "dtype"),
        ({"dtype": "fp8_e5m2", "layout": "tt"}, "layout"),
        ({"effort": "maximal"}, "effort"),
        ({"priority": 101}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"calls": -1}, "calls"),
        ({"calls": 10**15 + 1}, "calls"),
        ({"calls": 96.0}, "calls"),
        ({"calls": True}, "calls"),
        ({"calls": "96"}, "calls"),
        ({"calls": None}, "calls"),
        ({"device": "tpu"}, "device"),
        ({"device": 5}, "device"),
        ({"colour": "red"}, "colour"),
        ({"n": 2**31 - 1, "k": 2**20}, "n"),
    ],
)
def test_a_wrong_order_enqueues_nothing(
    client: httpx.Client, fields: dict[str, Any], wrong: str
) -> None:
    before = client.get("/jobs?limit=1").json()
    reply = client.post("/tune", json={"m": 105, "n": 64, "k": 64, **fields})
    assert reply.status_code == 422
    assert [error["field"] for error in reply.json()["errors"]] == [wrong]
    assert client.get("/jobs?limit=1").json() == before


def test_wrong_calls_are_answered_with_the_range(client: httpx.Client) -> None:
    (error,) = order(client, 105, calls=-1).json()["errors"]
    assert error == {
        "field": "calls",
        "message": "is out of range: -1",
        "accepted": "an integer in 0 … 1000000000000000",
    }
    schema = client.get("/openapi.json").json()["components"]["schemas"]["TuneBody"]
    calls = schema["properties"]["calls"]
    assert (calls["type"], calls["minimum"], calls["maximum"]) == ("integer", 0, 10**15)
    assert "How often" in calls["description"]


def test_a_job_shows_the_time_at_stake(client: httpx.Client) -> None:
    large = {"n": 4096, "k": 4096, "device": H200.slug}
    silent = order(client, 2048, **large).json()
    assert (silent["calls"], silent["expected_saving_us"]) == (0, None)
    told = order(client, 2048, **large, calls=10).json()
    assert (told["id"], told["calls"]) == (silent["id"], 10)
    # Half of its neighbour 4096×4096×4096, which takes cuBLAS 209 µs and ours 190.
    assert told["expected_saving_us"] == pytest.approx(10 * 104.5 * (1 - 1 / 1.1), rel=0.05)
    more = order(client, 2048, **large, calls=30).json()
    assert more["calls"] == 40
    assert more["expected_saving_us"] == pytest.approx(4 * told["expected_saving_us"])
    alone = client.get(f"/jobs/{more['id']}").json()
    assert alone == {**more, "waits": "waits: no worker is alive; start one with gemmsmith worker"}
    assert client.get("/jobs?limit=1").json()["jobs"] == [more]


def test_nothing_is_expected_of_a_problem_that_was_tuned(client: httpx.Client) -> None:
    tuned = order(client, 4096, n=4096, k=4096, calls=10**15).json()
    assert (tuned["calls"], tuned["expected_saving_us"]) == (10**15, 0.0)


def test_an_order_sent_twice_counts_once(client: httpx.Client) -> None:
    body = {"m": 108, "n": 64, "k": 64, "calls": 7}
    for _ in range(2):
        job = client.post("/tune", json=body, headers={"Idempotency-Key": "calls-1"}).json()
        assert job["calls"] == 7
    assert client.post("/tune", json=body).json()["calls"] == 14


def test_calls_count_before_any_device_is_known(tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as client:
        job = order(client, 64, calls=3).json()
        assert job["expected_saving_us"] > 0


def test_a_waiting_job_is_cancelled_at_once(client: httpx.Client) -> None:
    href = order(client, 106).headers["location"]
    assert client.delete(href).json()["state"] == "cancelled"
    again = client.delete(href)
    assert again.status_code == 202
    assert again.json()["state"] == "cancelled"
    assert "cancel" not in again.json()["links"]


def test_pages_lead_through_all_jobs_newest_first(tmp_path: Path) -> None:
    settings = new_settings(tmp_path)
    with Store.open(settings.database) as store:
        queue = Queue(store)
        ids = [queue.enqueue(Problem(m=m, n=8, k=8))[0].id for m in range(1, 8)]
        queue.cancel(ids[3])
    with running(settings) as client:
        listed = pages(client, "/jobs?state=waiting&limit=4", "jobs")
        found = [job["id"] for page in listed for job in page]
        assert found == [job for job in reversed(ids) if job != ids[3]]


def test_latest_of_no_jobs_is_a_404(tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as client:
        assert client.get("/jobs/latest").status_code == 404
        assert client.get("/jobs").json() == {"schema": 1, "jobs": [], "links": {}}
        assert client.get("/best?m=1&n=1&k=1").status_code == 404
        assert client.get("/devices").json() == {"devices": []}


def test_the_client_library_reads_a_job(client: httpx.Client) -> None:
    import msgspec

    status = msgspec.json.decode(order(client, 107, calls=5).content, type=JobStatus)
    assert status.problem == Problem(m=107, n=64, k=64)
    assert status.calls == 5
    assert status.expected_saving_us is not None
    assert status.expected_saving_us > 0
