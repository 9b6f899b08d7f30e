"""Lookups that cost: one client's do not starve the others', and have a limit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith.core.problem import Problem
from service.http.access import LOCAL, Caller, whose
from service.http.turns import Turns
from service.lookup.reader import AnswerReader, Body
from tests.support.processes import until
from tests.support.serving import new_settings, promote, running, winner

KNOWN = {"m": 4096, "n": 4096, "k": 4096}
LIMIT = 60


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path, lookups_limit=LIMIT)
    promote(settings, winner(Problem(m=4096, n=4096, k=4096)))
    with running(settings) as client:
        yield client


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Batches do not get on until this is set."""
    event = threading.Event()
    batch = AnswerReader.batch

    def waiting(*given: Any, **more: Any) -> Body:
        assert event.wait(20)
        return batch(*given, **more)

    monkeypatch.setattr(AnswerReader, "batch", waiting)
    yield event
    event.set()


def cold(number: int, count: int) -> dict[str, Any]:
    first = 8 * count * number
    return {
        "problems": [{"m": first + 8 * step, "n": 512, "k": 512} for step in range(1, 1 + count)]
    }


@pytest.mark.parametrize("form", [{}, {"headers": {"Content-Type": "application/json; v=1"}}])
def test_a_clients_batches_have_a_limit_together(
    client: httpx.Client, held: threading.Event, form: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(12) as pool:
        batches = [
            pool.submit(client.post, "/best:batch", json=cold(number, 10), **form)
            for number in range(10)
        ]
        until(lambda: sum(batch.done() for batch in batches) == 4, "not all else are refused")
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=client.base_url, transport=elsewhere, timeout=20) as other:
            theirs = pool.submit(other.post, "/best:batch", json=cold(20, 10), **form)
            held.set()
            assert theirs.result().status_code == 200, "another client's are its own"
    statuses = Counter(batch.result().status_code for batch in batches)
    assert statuses == {200: LIMIT // 10, 429: 4}
    (refused, *_) = [reply for batch in batches if (reply := batch.result()).status_code == 429]
    assert refused.json()["type"] == "urn:gemmsmith:problem:too-many-lookups"
    assert refused.headers["Retry-After"] == "2"
    reply = client.post("/best:batch", json=cold(1, 10), **form)
    assert reply.status_code == 200, "room comes back"
    reply = client.post("/best:batch", json=cold(1, 2 * LIMIT), **form)
    assert reply.status_code == 200, "one alone may be any size"


def test_others_are_answered_while_one_clients_batches_take_long(
    client: httpx.Client, held: threading.Event
) -> None:
    with ThreadPoolExecutor(45) as pool:  # more than the server has threads for all the rest
        batches = [
            pool.submit(client.post, "/best:batch", json=cold(number, 1)) for number in range(45)
        ]
        time.sleep(0.5)
        for path in ("/readyz", "/healthz", "/devices"):
            assert client.get(path).status_code == 200
        for m in (4096, 4104):
            assert client.get("/best", params={**KNOWN, "m": m}).status_code == 200
        assert not any(batch.done() for batch in batches)
        held.set()
        assert [batch.result().status_code for batch in batches] == [200] * 45


def test_a_client_leaves_a_thread_to_others_and_keeps_its_order() -> None:
    working: list[str] = []
    going_on = threading.Event()

    def work(name: str) -> str:
        working.append(name)
        assert going_on.wait(20)
        return name

    async def scenario() -> list[str]:
        turns = Turns(2, of_client=1)
        greedy = [asyncio.create_task(turns.run("a", work, f"a{number}")) for number in range(5)]
        await asyncio.sleep(0.05)
        assert working == ["a0"]
        other = asyncio.create_task(turns.run("b", work, "b0"))
        await asyncio.sleep(0.05)
        assert working == ["a0", "b0"]
        going_on.set()
        done = [*await asyncio.gather(*greedy), await other]
        assert turns._clients == {}, "nothing is kept of who has gone"
        return done

    assert asyncio.run(scenario()) == ["a0", "a1", "a2", "a3", "a4", "b0"]
    assert [name for name in working if name[0] == "a"] == ["a0", "a1", "a2", "a3", "a4"]


def test_requests_are_counted_under_the_key_or_else_the_address() -> None:
    connection = {"client": ("10.1.2.3", 1)}
    assert whose(LOCAL, connection) == "10.1.2.3"
    assert whose(Caller(name="ann", scopes=frozenset()), connection) == "key ann"
    assert whose(LOCAL, {"client": None}) == ""
