"""Clients that say nothing, too slowly, or too often: over real sockets, with small limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import httpx
import psutil
import pytest
import structlog

from gemmsmith.core.problem import Problem
from service.http.access import client_of
from service.http.connections import (
    HEALTH_RESERVE,
    OTHER_FILES,
    Connections,
    Limits,
)
from service.settings import Settings
from tests.support.processes import address, serving, until
from tests.support.serving import new_settings, promote, running, winner
from tests.support.wire import connect, read_to_the_end

KNOWN = Problem(m=4096, n=4096, k=4096)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
DEVICES = HEALTH.replace(b"healthz", b"devices")
UNFINISHED = b"GET /devices HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
BODY = b"POST /best:batch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"


def ask(link: socket.socket, request: bytes) -> int:
    """The status that is answered, the answer taken whole; 0 where the connection is closed."""
    with contextlib.suppress(ConnectionError), HTTPResponse(link) as answer:
        link.sendall(request)
        answer.begin()
        if answer.length:  # an event stream has none
            answer.read()
        return answer.status
    return 0


@pytest.fixture
def hurried(tmp_path: Path) -> Iterator[httpx.Client]:
    """A service that waits for nobody."""
    settings = new_settings(tmp_path, idle_timeout_s=0.2, request_timeout_s=0.4)
    with running(settings) as client:
        yield client


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", HEALTH], ids=["nothing", "empty lines", "one"])
def test_an_idle_connection_is_closed(hurried: httpx.Client, sent: bytes) -> None:
    with connect(hurried) as link:
        began = time.monotonic()
        link.sendall(sent)
        assert read_to_the_end(link).count(b"HTTP/1.1") == (sent is HEALTH)
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("sent", [b"GET /dev", UNFINISHED, BODY], ids=["line", "head", "body"])
def test_a_request_has_to_come_in_time_however_it_trickles(
    hurried: httpx.Client, sent: bytes
) -> None:
    with connect(hurried) as link:
        began = time.monotonic()
        link.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                link.sendall(b"x")
                link.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    answer = link.recv(65536)
                    break
        assert time.monotonic() - began < 2
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["type"] == "urn:gemmsmith:problem:request-timeout"


@pytest.mark.long
def test_who_does_not_take_the_answer_is_hung_up_on(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, request_timeout_s=0.4)
    promote(settings, winner(KNOWN))
    problem = {"m": KNOWN.m, "n": KNOWN.n, "k": KNOWN.k}
    content = json.dumps({"problems": [problem] * 10_000}).encode()
    request = BODY.replace(b"1000", b"%d\r\nContent-Type: application/json" % len(content))
    with running(settings) as client:
        with connect(client) as slow:
            slow.sendall(request + content)
            last = b""
            while not last.endswith(b"]}"):  # slow, but it takes it
                last = slow.recv(200_000)
                assert last
                time.sleep(0.02)
        with connect(client) as stuck:
            stuck.sendall(request + content)
            assert stuck.recv(10)
            time.sleep(1.5)
            assert not read_to_the_end(stuck).endswith(b"]}")


def test_an_answer_that_takes_long_is_waited_for(tmp_path: Path) -> None:
    settings = new_settings(
        tmp_path, idle_timeout_s=0.2, request_timeout_s=0.2, events_heartbeat_s=0.5
    )
    with running(settings) as client:
        client.post("/tune", json={"m": 8, "n": 8, "k": 8}).raise_for_status()
        with client.stream("GET", "/jobs/latest/events") as stream:
            assert next(line for line in stream.iter_lines() if line.startswith(":"))


def test_connections_that_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, connections=40, client_connections=20)
    with running(settings) as client, ExitStack() as held:
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            for sent in (b"", UNFINISHED, BODY) * 20:
                held.enter_context(connect(client, source)).sendall(sent)
        for source in ("127.0.0.1", "127.0.0.4"):
            link = held.enter_context(connect(client, source))
            assert ask(link, DEVICES) == 200
            assert ask(link, DEVICES) == 200, "and stays"


def test_one_address_cannot_take_the_connections_of_others(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, connections=40, client_connections=8)
    with running(settings) as client, ExitStack() as held:
        other = held.enter_context(connect(client, "127.0.0.2"))
        assert ask(other, DEVICES) == 200
        many = [held.enter_context(connect(client)) for _ in range(60)]
        for link in many:
            with contextlib.suppress(ConnectionError):
                link.sendall(UNFINISHED)
        assert ask(other, DEVICES) == 200, "the other one's was not taken"
        until(lambda: sum(map(is_open, many)) <= 8, "it has more than its share")


def is_open(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return bool(link.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_health_is_told_while_all_connections_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "streams", 100)
    monkeypatch.setattr(Limits, "streams_of_key", 100)
    settings = new_settings(tmp_path, connections=6, client_connections=6)
    with running(settings) as client, ExitStack() as held:
        client.post("/tune", json={"m": 8, "n": 8, "k": 8}).raise_for_status()
        client.close()
        for _ in range(6):
            link = held.enter_context(connect(client))
            assert ask(link, DEVICES.replace(b"/devices", b"/jobs/latest/events")) == 200
        with structlog.testing.capture_logs() as logged:
            for _ in range(2 * HEALTH_RESERVE):
                held.enter_context(connect(client)).sendall(UNFINISHED)
            for path in (b"/healthz", b"/readyz"):
                with connect(client) as link:
                    assert ask(link, HEALTH.replace(b"/healthz", path)) == 200
                    assert read_to_the_end(link) == b"", "and does not stay"
            with connect(client) as link:
                link.sendall(DEVICES)
                answer = read_to_the_end(link)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too-many-connections" in answer
        short = [line for line in logged if line["event"] == "connection limit reached"]
        assert len(short) == 1, "said once, not for each"
        assert short[0]["client"] == "127.0.0.1"


class Idle:
    """A connection that does nothing."""

    deadline = float("inf")

    def __init__(self, client_name: str) -> None:
        self.client_name = client_name

    def late(self) -> None: ...

    def evict(self) -> None: ...


def test_of_one_address_few_requests_begin_at_once() -> None:
    begun: list[str] = []

    async def scenario() -> list[str]:
        loop = asyncio.get_running_loop()
        limits = Limits(connections=9, of_client=9, of_key=9)
        connections = Connections(limits, idle_s=60, request_s=60)
        for name in "ab":
            connections.admit(Idle(name), loop)
        turns = []
        for name in "a" * 40 + "b":
            connections.begin(name, lambda name=name: begun.append(name), loop)  # type: ignore[misc]
        while len("".join(turns)) < 41:
            turns.append("".join(begun))
            begun.clear()
            await asyncio.sleep(0)
        connections.begin("c", lambda: begun.append("c"), loop)  # in the reserve
        assert begun == ["c"]
        assert connections._beginning == {}
        return turns

    assert asyncio.run(scenario()) == ["a" * 16 + "b", "a" * 16, "a" * 8]


def test_limits_follow_from_what_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    room = 1024 - OTHER_FILES - HEALTH_RESERVE
    of_each = room // 4
    assert Limits.of(Settings()) == Limits(connections=room, of_client=of_each, of_key=of_each)
    assert Limits.of(Settings(client_connections=4096)).of_client == room
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert Limits.of(Settings()) == Limits(connections=4096, of_client=1024, of_key=1024)
    assert (Limits.of(Settings()).streams, Limits.of(Settings()).streams_of_key) == (1024, 256)
    # Behind a proxy one address may have all connections, and one key its share all the same.
    behind = Limits.of(Settings(client_connections=4096, require_keys=True))
    assert behind == Limits(connections=4096, of_client=4096, of_key=1024)


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_of_ipv6_a_client_has_a_whole_network(address: str, client: str) -> None:
    assert client_of(address) == client


@pytest.mark.long
def test_the_service_raises_its_limit_and_says_once_that_files_have_run_out(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with serving(tmp_path) as (process, banner):
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
            with (
                httpx.Client(base_url=address(banner), timeout=20) as client,
                ExitStack() as held,
            ):
                assert client.get("/healthz").status_code == 200
                open_ = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_, hard))
                for _ in range(20):
                    with contextlib.suppress(ConnectionError):
                        held.enter_context(connect(client))
                log = tmp_path / "log"
                until(lambda: "connections refused" in log.read_text(), "nothing is logged")
                busy = psutil.Process(process.pid).cpu_times
                spent = busy().user + busy().system
                time.sleep(1.5)
                assert busy().user + busy().system - spent < 0.7, "it spins"
                assert log.read_text().count("connections refused") == 1
                assert os.strerror(errno.EMFILE) in log.read_text()
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
                held.close()
                with connect(client) as link:
                    assert ask(link, HEALTH) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
