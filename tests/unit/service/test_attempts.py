"""Keys that are guessed: limited for each address, logged with it, and nobody else's loss."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import structlog

from service.errors import ProblemError
from service.http import bodies
from service.http.access import Scope
from service.http.attempts import AT_ONCE, EACH_S, Attempts
from tests.support.processes import address, serving
from tests.support.serving import keyed, new_settings, running
from tests.support.wire import connect
from tuner.store import Store

ELSEWHERE = httpx.HTTPTransport(local_address="127.0.0.2")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[httpx.Client, str]]:
    """A service that takes keys, and one."""
    with keyed(new_settings(tmp_path, require_keys=True), ann=Scope.READ) as running:
        yield running.http, running.keys["ann"]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_guessing_keys_is_limited_and_logged(service: tuple[httpx.Client, str]) -> None:
    client, secret = service

    def guess(number: int) -> httpx.Response:
        return client.get("/devices", headers=bearer(f"gsk_{number}"))

    with structlog.testing.capture_logs() as logged, ThreadPoolExecutor(20) as pool:
        began = time.monotonic()
        replies = list(pool.map(guess, range(3 * AT_ONCE)))
        passed = AT_ONCE + (time.monotonic() - began) / EACH_S + 1
    statuses = [reply.status_code for reply in replies]
    assert set(statuses) == {401, 429}
    assert AT_ONCE <= statuses.count(401) <= passed
    (refused, *_) = [reply for reply in replies if reply.status_code == 429]
    assert refused.json()["type"] == "urn:gemmsmith:problem:too-many-unknown-keys"
    assert int(refused.headers["Retry-After"]) >= 1
    unknown = [line for line in logged if line["event"] == "unknown key"]
    assert len(unknown) == statuses.count(401)
    assert {line["client"] for line in logged if "unknown key" in line["event"]} == {"127.0.0.1"}
    assert not [line for line in logged if "gsk_" in str(line)]

    assert client.get("/devices", headers=bearer(secret)).status_code == 200, "known keys pass"
    with httpx.Client(base_url=client.base_url, transport=ELSEWHERE) as other:
        assert other.get("/devices", headers=bearer("gsk_x")).status_code == 401, "another address"
    form = client.post("/ui/login", data={"key": "gsk_y"})
    assert form.status_code == 429, "the form is no way round"


def test_tries_come_back_with_time_and_are_not_lost_by_a_new_key() -> None:
    now = 0.0
    attempts = Attempts(lambda: now)
    for _ in range(AT_ONCE):
        attempts.begin("a")
    with pytest.raises(ProblemError) as caught:
        attempts.begin("a")
    assert caught.value.headers["Retry-After"] == "1"
    attempts.begin("b")
    attempts.succeeded("a")
    attempts.begin("a")
    now = 2 * EACH_S
    attempts.begin("a")
    attempts.begin("a")
    with pytest.raises(ProblemError):
        attempts.begin("a")


def test_without_a_key_no_body_is_read(service: tuple[httpx.Client, str]) -> None:
    client, secret = service
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(60):
            sent += 60_000
            yield b" " * 60_000
            time.sleep(0.01)

    for headers in ({}, bearer("gsk_wrong")):
        sent = 0
        try:
            reply = client.post("/best:batch", content=endless(), headers=headers)
        except httpx.TransportError:  # it may hang up while more is sent
            pass
        else:
            assert reply.status_code == 401
            assert reply.headers["connection"] == "close"
        assert sent < 3_000_000, "all of it was taken"
    reply = client.post("/best:batch", content=endless(), headers=bearer(secret))
    assert reply.status_code == 422
    form = client.post("/ui/login", content=b"key=" + b"x" * 20_000)
    assert form.status_code == 413, "nor much of a form"


def test_bodies_in_memory_are_limited_for_each_client_and_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_SHARE_BYTES", 100_000)  # and four times that in all
    settings = new_settings(tmp_path, max_body_bytes=100_000)
    head = b"POST /best:batch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 90000\r\n\r\n"
    with running(settings) as client, ExitStack() as held:

        def post(source: int, path: str, content: bytes) -> httpx.Response:
            transport = httpx.HTTPTransport(local_address=f"127.0.0.{source}")
            other = held.enter_context(
                httpx.Client(base_url=client.base_url, transport=transport, timeout=20)
            )
            return other.post(path, content=content, headers={"Content-Type": "application/json"})

        waiting = [
            held.enter_context(connect(client, f"127.0.0.{source}")) for source in range(1, 5)
        ]
        for link in waiting:
            link.sendall(head + b" " * 89_999)
        time.sleep(0.2)
        for source, status in ((1, 429), (5, 503)):
            reply = post(source, "/best:batch", b" " * 90_000)
            assert reply.status_code == status
            assert reply.headers["Retry-After"] == "1"
            assert reply.json()["type"] == "urn:gemmsmith:problem:too-many-bodies"
            # Small ones are read, even if others hold all that large ones may take.
            assert post(source, "/tune", b'{"m": 8, "n": 8, "k": 8}').status_code in (200, 202)
        for link in waiting:
            link.sendall(b" ")
            assert link.recv(20).startswith(b"HTTP/1.1 422 ")
        assert post(1, "/best:batch", b" " * 90_000).status_code == 400, "room comes back"


@pytest.mark.long
def test_large_bodies_without_a_key_take_no_memory(tmp_path: Path) -> None:
    database = tmp_path / "state" / "gemmsmith.db"
    database.parent.mkdir()
    settings = new_settings(tmp_path, database=f"sqlite:///{database}")
    with Store.open(settings.database) as store:
        store.keys.create("ann", Scope.READ)
    with serving(tmp_path, GEMMSMITH_REQUIRE_KEYS="1") as (process, banner):
        url = address(banner)
        memory = psutil.Process(process.pid).memory_info
        httpx.get(f"{url}/healthz").raise_for_status()
        before = memory().rss
        head = b"POST /best:batch HTTP/1.1\r\nHost: x\r\nContent-Length: 4194304\r\n\r\n"
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        with ExitStack() as held:
            for _ in range(60):
                link = held.enter_context(socket.create_connection(place, 20))
                with suppress(ConnectionError):  # it hangs up
                    link.sendall(head + b" " * (2**22 - 1))
            grown = memory().rss - before
        print(f"{grown / 2**20:.0f} MiB more")
        assert grown < 60 * 2**20
