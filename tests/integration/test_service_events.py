"""Event streams over a real connection, with the queue written by another "process"."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemmsmith.core.problem import Problem
from service.settings import Settings
from tests.support.present import present
from tests.support.serving import new_settings, running
from tuner.jobs import LeasedJob, Queue
from tuner.store import Store

PROBLEM = Problem(m=64, n=64, k=64)


@dataclass(frozen=True)
class Event:
    id: int
    kind: str
    data: dict[str, Any]


def read_events(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith((":", "retry:")):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Event(int(fields["id"]), fields["event"], json.loads(fields["data"]))
            fields = {}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return new_settings(tmp_path, events_heartbeat_s=0.1)


@pytest.fixture
def queue(settings: Settings) -> Iterator[Queue]:
    with Store.open(settings.database) as store:
        yield Queue(store)


def leased(queue: Queue) -> LeasedJob:
    queue.enqueue(PROBLEM)
    return present(queue.lease("test:1", ["any"]))


def test_events_arrive_as_they_happen_and_end_with_the_job(
    settings: Settings, queue: Queue
) -> None:
    job = leased(queue)
    with running(settings) as client, client.stream("GET", "/jobs/latest/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = read_events(stream.iter_lines())
        assert [next(events).kind for _ in range(2)] == ["created", "started"]
        job.progress("screen", 3, 10, 12.5, "candidate")
        seen = next(events)
        assert seen.kind == "progress"
        assert seen.data["best_us"] == 12.5
        assert seen.data["job"] == job.job.id
        job.complete(7)
        last = list(events)
        assert [event.kind for event in last] == ["finished"]
        assert last[0].data["winner_revision"] == 7


def test_a_stream_resumes_after_the_last_event_seen(settings: Settings, queue: Queue) -> None:
    job = leased(queue)
    url = f"/jobs/{job.job.id}/events"
    with running(settings) as client:
        with client.stream("GET", url) as stream:
            seen = next(read_events(stream.iter_lines()))  # and the connection breaks
        for done in range(300):  # more than is read at once
            job.event("trial", {"number": done})
        job.fail("hopeless", retry=False)
        headers = {"Last-Event-ID": str(seen.id)}
        with client.stream("GET", url, headers=headers) as stream:
            rest = list(read_events(stream.iter_lines()))
        assert [event.id for event in rest] == list(range(2, 304))
        assert rest[-1].kind == "failed"
        assert rest[-1].data["error"] == "hopeless"
        with client.stream("GET", f"{url}?after=303") as stream:
            assert list(read_events(stream.iter_lines())) == []
        for wrong in ("x", "-1", "9" * 30):
            reply = client.get(url, headers={"Last-Event-ID": wrong})
            assert reply.status_code == 422
            assert reply.json()["errors"][0]["field"] == "Last-Event-ID"


def test_an_idle_stream_sends_comments(settings: Settings, queue: Queue) -> None:
    leased(queue)
    with running(settings) as client, client.stream("GET", "/jobs/latest/events") as stream:
        comments = (line for line in stream.iter_lines() if line.startswith(":"))
        assert next(comments)
        assert next(comments)


def test_cancelling_a_running_job_reaches_worker_and_stream(
    settings: Settings, queue: Queue
) -> None:
    job = leased(queue)
    with running(settings) as client, client.stream("GET", "/jobs/latest/events") as stream:
        events = read_events(stream.iter_lines())
        reply = client.delete(f"/jobs/{job.job.id}")
        assert reply.json()["state"] == "running"
        assert reply.json()["cancel_requested"]
        assert job.heartbeat()
        job.cancelled()
        assert [event.kind for event in events][-1] == "cancelled"


def test_streams_do_not_block_lookups_nor_each_other(settings: Settings, queue: Queue) -> None:
    job = leased(queue)
    ended: list[int] = []

    def follow(base: httpx.URL) -> None:
        with (
            httpx.Client(base_url=base, timeout=20) as client,
            client.stream("GET", "/jobs/latest/events") as stream,
        ):
            ended.append(len(list(read_events(stream.iter_lines()))))

    with running(settings) as client:
        threads = [threading.Thread(target=follow, args=(client.base_url,)) for _ in range(60)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        for _ in range(10):
            assert client.get("/best?m=1&n=1&k=1").status_code == 404
        assert time.monotonic() - began < 10
        job.complete(1)
        for thread in threads:
            thread.join(20)
        assert ended == [3] * 60


def test_stopping_the_server_ends_streams_at_once(settings: Settings, queue: Queue) -> None:
    leased(queue)
    with running(settings) as client:
        connection = socket.create_connection((client.base_url.host, client.base_url.port or 80))
        connection.sendall(b"GET /jobs/latest/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(1000)
        client.close()
        began = time.monotonic()
    with connection:
        assert time.monotonic() - began < 4
        while connection.recv(10_000):
            pass
