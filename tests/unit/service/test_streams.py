"""Many event streams at once: what they cost, how many there may be, and when they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gemmsmith.core.problem import Problem
from service.http.access import Scope
from service.settings import Settings
from tests.support.present import present
from tests.support.processes import until
from tests.support.queries import statements
from tests.support.serving import new_settings, running
from tuner.jobs import LeasedJob, Queue, news
from tuner.jobs.news import News
from tuner.store import Store, upgrade

POLL_S = 0.1
STREAMS = 24


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(
        tmp_path,
        events_poll_s=POLL_S,
        events_heartbeat_s=30,
        connections=400,
        client_connections=400,
        require_keys=True,
    )


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with Store.open(settings.database) as store:
        yield store


def leased(store: Store, size: int = 64) -> LeasedJob:
    queue = Queue(store)
    queue.enqueue(Problem(m=size, n=64, k=64))
    return present(queue.lease("test:1", ["any"]))


class Follower:
    """A client of a stream: what it got, and whether the stream has ended."""

    def __init__(self, base: httpx.URL, path: str, secret: str) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._follow, args=(base, path, secret))
        self._thread.start()

    def _follow(self, base: httpx.URL, path: str, secret: str) -> None:
        headers = {"Authorization": f"Bearer {secret}"}
        with (
            httpx.Client(base_url=base, timeout=30, headers=headers) as client,
            client.stream("GET", path) as stream,
        ):
            self.lines += [str(stream.status_code)]
            self.lines += (line for line in stream.iter_lines() if line.startswith("id:"))

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


def test_many_streams_are_fed_by_one_look(settings: Settings, store: Store) -> None:
    _, secret = store.keys.create("ann", Scope.READ)
    jobs = [leased(store, 64 + 8 * number) for number in range(4)]
    with running(settings) as client:
        followers = [
            Follower(client.base_url, f"/jobs/{jobs[number % 4].job.id}/events", secret)
            for number in range(STREAMS)
        ]
        until(lambda: all(len(one.lines) == 3 for one in followers), "not all have begun")
        time.sleep(3 * POLL_S)
        with statements("FROM job") as queries:
            began = time.monotonic()
            time.sleep(10 * POLL_S)
            looks = (time.monotonic() - began) / POLL_S + 1
        assert 5 <= len(queries) <= looks, "one a look, not one a stream"
        with statements("FROM job") as queries:
            began = time.monotonic()
            for job in jobs:
                job.progress("screen", 1, 10, None, None)
            written = len(queries)
            until(lambda: all(len(one.lines) == 4 for one in followers), "not all are told")
            looks = (time.monotonic() - began) / POLL_S + 1
        assert len(queries) - written <= 2 * looks + 1
        for job in jobs:
            job.complete(1)
        until(lambda: all(one.ended for one in followers), "not all have ended")
        assert [one.lines for one in followers] == [
            ["200", *(f"id: {number}" for number in range(1, 5))]
        ] * STREAMS


def test_a_burst_and_late_comers_miss_nothing(settings: Settings, store: Store) -> None:
    _, secret = store.keys.create("ann", Scope.READ)
    job = leased(store)
    path = f"/jobs/{job.job.id}/events"
    with running(settings) as client:
        early = Follower(client.base_url, path, secret)
        until(lambda: len(early.lines) == 3, "it has not begun")
        for number in range(250):  # more than is kept, some between two looks
            job.event("trial", {"number": number})
        late = Follower(client.base_url, path, secret)
        beyond = Follower(client.base_url, path + "?after=999", secret)
        until(lambda: len(late.lines) == 253, "the late one has not caught up")
        job.fail("hopeless", retry=False)
        until(lambda: early.ended and late.ended and beyond.ended, "they have not ended")
    everything = ["200", *(f"id: {number}" for number in range(1, 254))]
    assert early.lines == late.lines == everything
    assert beyond.lines == ["200"]


def test_a_revoked_key_ends_its_streams_within_two_seconds(
    settings: Settings, store: Store
) -> None:
    _, revoked = store.keys.create("ann", Scope.READ)
    _, kept = store.keys.create("bob", Scope.READ)
    job = leased(store)
    path = f"/jobs/{job.job.id}/events"
    with running(settings) as client:
        gone, stays = (Follower(client.base_url, path, key) for key in (revoked, kept))
        until(lambda: len(gone.lines) == len(stays.lines) == 3, "they have not begun")
        store.keys.revoke("ann")
        began = time.monotonic()
        until(lambda: gone.ended, "it goes on")
        assert time.monotonic() - began < 2
        job.complete(1)
        until(lambda: stays.ended, "it does not end")
    assert gone.lines[-1] == "id: 2"
    assert stays.lines[-1] == "id: 3"


def test_streams_are_limited_for_each_address_and_in_all(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, connections=24, client_connections=16)  # 6 streams, 4 of one
    with Store.open(settings.database) as store:
        leased(store)
    with running(settings) as client, ExitStack() as held:

        def stream(source: str) -> httpx.Response:
            transport = httpx.HTTPTransport(local_address=source)
            asking = held.enter_context(
                httpx.Client(base_url=client.base_url, transport=transport, timeout=20)
            )
            return held.enter_context(asking.stream("GET", "/jobs/latest/events"))

        assert [stream("127.0.0.1").status_code for _ in range(5)] == [200] * 4 + [429]
        *_, last = replies = [stream("127.0.0.2") for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 503]
        assert last.headers["Retry-After"] == "5"
        assert last.read()
        assert last.json()["type"] == "urn:gemmsmith:problem:too-many-streams"
        assert client.get("/jobs/latest").status_code == 200
        held.close()
        until(lambda: stream("127.0.0.1").status_code == 200, "the place is not given back")


def test_news_of_many_jobs_are_read_together(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "_JOBS_AT_ONCE", 10)
    upgrade(store_url)
    with Store.open(store_url) as store:
        jobs = [leased(store, 64 + 8 * number) for number in range(12)]
        for job in jobs[::2]:
            job.progress("screen", 1, 10, None, None)
        reader = News(store.database)
        ids = [job.job.id for job in jobs]
        assert reader.newest([*ids, "unknown"]) == {
            name: 2 + (number % 2 == 0) for number, name in enumerate(ids)
        }
        with statements("FROM job") as queries:
            found = reader.since(dict.fromkeys(ids, 2))
        assert len(queries) == 2
        assert [(one.job, one.id, one.kind) for one in found] == [
            (name, 3, "progress") for name in ids[::2]
        ]
        assert found[0].data["phase"] == "screen"
        assert [one.id for one in reader.since({ids[0]: 0, ids[1]: 1})] == [1, 2, 3, 2]
