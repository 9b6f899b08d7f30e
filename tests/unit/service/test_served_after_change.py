"""Lookups after a change show it at once, on both roads to an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith.core.problem import Problem
from tests.support.present import present
from tests.support.serving import H100, H200, new_settings, promote, running, winner
from tuner.jobs import Queue
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
SIZES = {"m": 4096, "n": 4096, "k": 4096}


@pytest.fixture
def unwatched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[httpx.Client, Store]]:
    with unwatched_service(tmp_path, monkeypatch) as found:
        yield found


@contextmanager
def unwatched_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Iterator[tuple[httpx.Client, Store]]:
    """A service that does not look by itself, and the database."""
    monkeypatch.setattr("service.lookup.watcher.EVERY_S", 3600.0)
    settings = new_settings(tmp_path, **changes)
    promote(settings, winner(KNOWN, us=190.0))
    with Store.open(settings.database) as store, running(settings) as http:
        yield http, store


def served(http: httpx.Client) -> tuple[int, float]:
    """Revision and time of what is served; both roads agree."""
    batch = http.post("/best:batch", json={"problems": [SIZES]}).json()["answers"][0]
    answer = http.get("/best", params=SIZES).json()
    assert answer == batch
    return answer["revision"], answer["statistics"]["median_us"]


def test_a_choice_is_served_as_soon_as_it_is_told(
    unwatched: tuple[httpx.Client, Store],
) -> None:
    http, store = unwatched
    assert served(http) == (1, 190.0)
    store.promote(winner(KNOWN, us=100.0))
    assert served(http) == (1, 190.0), "nobody was told yet"
    for path, body, expected in (
        ("/winners/pin", {"revision": 1}, (1, 190.0)),
        ("/winners/unpin", {}, (2, 100.0)),
        ("/winners/rollback", {}, (1, 190.0)),
    ):
        assert http.post(path, json={**SIZES, **body}).status_code == 200
        assert served(http) == expected


@pytest.mark.parametrize("how", ["/jobs/{job}", "/jobs", "/jobs/latest", "/jobs/{job}/events"])
def test_who_is_told_that_a_job_is_over_finds_its_winner(
    unwatched: tuple[httpx.Client, Store], how: str
) -> None:
    http, store = unwatched
    assert served(http) == (1, 190.0)
    job = http.post("/tune", json=SIZES).json()["id"]
    leased = present(Queue(store).lease("somebody", ["any"]))
    store.promote(winner(KNOWN, us=100.0))
    told = http.get(f"/jobs/{job}").json()
    assert told["state"] == "running"
    leased.complete(2)
    reply = http.get(how.format(job=job))  # the events end with the job's
    assert "done" in reply.text or "finished" in reply.text
    assert served(http) == (2, 100.0)


def test_a_change_that_cannot_be_looked_for_empties_the_memory(
    unwatched: tuple[httpx.Client, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.errors import StoreError
    from tuner.store.changes import Changes

    def fail(_: Changes) -> None:
        raise StoreError("gone for a moment")

    http, store = unwatched
    assert served(http) == (1, 190.0)
    store.promote(winner(KNOWN, us=100.0))
    monkeypatch.setattr(Changes, "marks", fail)
    assert http.post("/winners/pin", json={**SIZES, "revision": 2}).status_code == 200
    assert served(http) == (2, 100.0)


def test_answers_are_about_the_device_that_is_known_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unwatched_service(tmp_path, monkeypatch, default_model=H100.slug) as (http, store):
        assert http.get("/best", params=SIZES).json()["device"]["name"] == H200.name
        store.promote(winner(KNOWN, device=H100, us=250.0))
        http.post("/winners/pin", json={**SIZES, "device": H100.slug, "revision": 1})
        assert http.get("/best", params=SIZES).json()["device"]["name"] == H100.name
