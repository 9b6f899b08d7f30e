"""`/winners/history`, `/pin`, `/unpin` and `/rollback`, over real HTTP and through the clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith import (
    AsyncClient,
    Client,
    NotTuned,
    Origin,
    Problem,
    Rejected,
    ServiceUnavailable,
)
from service.settings import Settings
from tests.support.serving import (
    ENVIRONMENT,
    H100,
    H200,
    new_settings,
    pages,
    promote,
    running,
    winner,
)
from tuner.store import Store
from tuner.store.audit import Action

KNOWN = Problem(m=4096, n=4096, k=4096)
ONCE = Problem(m=512, n=512, k=8192)
UNKNOWN = Problem(m=7, n=7, k=7)
SIZES = {"m": 4096, "n": 4096, "k": 4096}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Three revisions of one problem and one of another; the GPUs run something newer."""
    monkeypatch.setattr("service.http.state.usable_gpu", lambda: H200)
    settings = new_settings(tmp_path / "service")
    promote(settings, *(winner(KNOWN, us=us) for us in (190.0, 180.0, 170.0)), winner(ONCE))
    promote(settings, winner(KNOWN, device=H100))
    with Store.open(settings.database) as store:
        store.gpus.report(H200, replace(ENVIRONMENT, driver="590.1"))
        store.promote(replace(winner(KNOWN, us=1.0), replayed=True))
    return settings


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url), cache_dir=None, retries=0) as found:
        yield found


def best(http: httpx.Client, **known: str) -> httpx.Response:
    return http.get("/best", params=SIZES, headers=known)


def test_a_history_shows_every_revision_and_where_it_comes_from(http: httpx.Client) -> None:
    revisions = http.get("/winners/history", params=SIZES).json()["revisions"]
    shown = [
        (r["answer"]["revision"], r["current"], r["origin"], r["answer"]["stale"])
        for r in revisions
    ]
    assert shown == [
        (4, False, "replayed", False),
        (3, True, "measured", True),
        (2, False, "measured", True),
        (1, False, "measured", True),
    ]
    assert revisions[1]["answer"] == best(http).json()
    other = http.get("/winners/history", params={**SIZES, "device": H100.slug}).json()
    assert [r["answer"]["stale"] for r in other["revisions"]] == [False]
    assert http.get(other["revisions"][0]["links"]["history"]["href"]).json() == other


def test_a_history_comes_in_pages(http: httpx.Client, client: Client) -> None:
    listed = pages(http, "/winners/history?m=4096&n=4096&k=4096&limit=3", "revisions")
    assert [r["answer"]["revision"] for page in listed for r in page] == [4, 3, 2, 1]
    assert [r.answer.revision for r in client.history(KNOWN, limit=2)] == [4, 3]


def test_pin_unpin_and_roll_back_change_what_is_served(
    http: httpx.Client, client: Client, settings: Settings
) -> None:
    before = best(http).headers["etag"]
    pinned = client.pin(KNOWN, 1)
    assert (pinned.current, pinned.origin, pinned.answer.pinned) == (True, Origin.MEASURED, True)
    assert pinned.answer == client.best(4096, 4096, 4096)
    assert pinned.answer.statistics is not None
    assert pinned.answer.statistics.median_us == 190.0
    promote(settings, winner(KNOWN, us=100.0))
    assert client.best(4096, 4096, 4096) == pinned.answer
    assert client.rollback(KNOWN).answer.revision == 3
    assert client.unpin(KNOWN).answer.revision == 5
    assert not client.best(4096, 4096, 4096).pinned
    assert best(http, **{"If-None-Match": before}).status_code == 200
    with Store.open(settings.database) as store:
        chosen = [(e.action, e.actor) for e in store.audit.entries() if e.action != "promoted"]
    assert chosen == [
        (Action.UNPINNED, "local"),
        (Action.ROLLED_BACK, "local"),
        (Action.PINNED, "local"),
    ]


def test_pinning_what_is_served_is_seen_by_those_who_have_it(
    http: httpx.Client, client: Client
) -> None:
    tag = best(http).headers["etag"]
    assert best(http, **{"If-None-Match": tag}).status_code == 304
    client.pin(KNOWN, 3)
    renewed = best(http, **{"If-None-Match": tag})
    assert (renewed.status_code, renewed.json()["pinned"]) == (200, True)


def test_the_clients_do_the_same(client: Client, http: httpx.Client) -> None:
    async def test() -> list[Any]:
        async with AsyncClient(str(http.base_url), cache_dir=None, retries=0) as found:
            return [
                await found.pin(KNOWN, 2),
                await found.rollback(KNOWN),
                await found.unpin(KNOWN),
                await found.history(KNOWN, device=H200.slug),
            ]

    *chosen, history = asyncio.run(test())
    assert [revision.answer.revision for revision in chosen] == [2, 3, 3]
    assert history == client.history(KNOWN)


@pytest.mark.parametrize(
    ("verb", "body", "status", "kind", "says"),
    [
        ("pin", {**SIZES, "revision": 9}, 422, "invalid-input", "revision: .*it has 1, 2, 3, 4"),
        ("pin", SIZES, 422, "invalid-input", "revision: is required"),
        ("pin", {**SIZES, "revision": 0}, 422, "invalid-input", "revision: .*1 … 2147483647"),
        ("pin", {**SIZES, "revision": "1"}, 422, "invalid-input", "must be an integer"),
        ("pin", {"m": 7, "n": 7, "k": 7, "revision": 1}, 404, "not-tuned", "POST /tune"),
        ("unpin", SIZES, 409, "nothing-to-undo", "no revision of .* is pinned"),
        ("unpin", {**SIZES, "revision": 1}, 422, "invalid-input", "revision: .*not a known field"),
        ("rollback", {"m": 512, "n": 512, "k": 8192}, 409, "nothing-to-undo", "no other revision"),
        ("rollback", {**SIZES, "device": "nope"}, 422, "invalid-input", "device: unknown"),
        ("rollback", {**SIZES, "m": 0}, 422, "invalid-input", "m: is out of range"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    http: httpx.Client, verb: str, body: dict[str, Any], status: int, kind: str, says: str
) -> None:
    before = http.get("/winners/history", params=SIZES).json()
    reply = http.post(f"/winners/{verb}", json=body)
    problem = reply.json()
    assert (reply.status_code, problem["type"].rsplit(":", 1)[1]) == (status, kind)
    assert reply.headers["content-type"] == "application/problem+json"
    assert re.search(says, problem["detail"]), problem["detail"]
    assert http.get("/winners/history", params=SIZES).json() == before


def test_a_history_of_nothing_is_not_found(http: httpx.Client, client: Client) -> None:
    reply = http.get("/winners/history", params={"m": 7, "n": 7, "k": 7})
    assert (reply.status_code, reply.json()["links"]["tune"]["body"]["m"]) == (404, 7)
    assert http.get("/winners/history", params={**SIZES, "after": "x"}).status_code == 422
    with pytest.raises(NotTuned):
        client.history(UNKNOWN)
    with pytest.raises(NotTuned):
        client.rollback(UNKNOWN)
    with pytest.raises(Rejected, match="it has 1"):
        client.pin(ONCE, 2)


def test_before_anything_is_known_nothing_is_found(tmp_path: Path) -> None:
    with running(new_settings(tmp_path / "empty")) as http:
        assert http.get("/winners/history", params=SIZES).status_code == 404
        assert http.post("/winners/unpin", json=SIZES).status_code == 404


def test_a_choice_is_sent_once() -> None:
    sent: list[httpx.Request] = []

    def lose(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        raise httpx.ReadError("connection reset", request=request)

    with (
        Client(cache_dir=None, retries=3, transport=httpx.MockTransport(lose)) as client,
        pytest.raises(ServiceUnavailable, match="look at the history"),
    ):
        client.rollback(KNOWN)
    assert len(sent) == 1
