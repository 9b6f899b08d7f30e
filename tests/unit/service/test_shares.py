"""One key cannot starve the others, whatever it sends: each has a share of all that is limited."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fastapi.routing
import httpx
import pytest
import structlog

from gemmsmith.core.problem import Problem
from service.http.access import Scope
from service.lookup.reader import AnswerReader
from service.lookup.snapshots import Snapshots
from tests.support.processes import until
from tests.support.serving import H200, new_settings, promote, running, winner
from tests.support.wire import connect, read_to_the_end
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
SIZES = {"m": 4096, "n": 4096, "k": 4096}
QUERY = "m=4096&n=4096&k=4096"
READS = [
    "/winners?limit=1000",
    "/winners?format=csv",
    "/results?limit=1000",
    "/jobs?limit=1000",
    f"/winners/history?{QUERY}",
    "/packs",
    "/devices",
    "/kernels/none",
    "/metrics",
    "/openapi.json",
    "/ui",
    "/ui/jobs",
    f"/ui/problems?device={H200.slug}",
    "/best?m=0",
]
"""Of every kind that a thread works on."""

FORM = "Content-Type: application/x-www-form-urlencoded"
JSON = "Content-Type: application/json"

Asked = tuple[str, str, bytes]
"""Method, path and body."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service, and two clients of it, one of which is greedy."""

    greedy: httpx.Client
    modest: httpx.Client
    thread: threading.Thread

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        length: int | None = None,
        *,
        headers: Sequence[str] = (),
        source: str = "127.0.0.1",
    ) -> socket.socket:
        """A connection on which the greedy key has sent that; `length` is that of all the body."""
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
        lines.append(f"Authorization: {self.greedy.headers['authorization']}")
        lines += [*headers, *([JSON] if FORM not in headers else [])]
        lines += [f"Content-Length: {len(body) if length is None else length}"] if body else []
        link = connect(self.greedy, source)
        with suppress(ConnectionError):
            link.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return link

    def is_well(self) -> None:
        """The modest client gets all that it may want."""
        asked = {"problems": [SIZES]}
        for method, path, body, status in (
            ("POST", "/tune", {"m": 64, "n": 64, "k": 64}, (200, 202)),
            ("GET", "/jobs/latest", None, (200,)),
            ("GET", "/winners", None, (200,)),
            ("GET", f"/best?{QUERY}", None, (200,)),
            ("GET", f"/best?m=8&n=8&k={time.monotonic_ns() % 10**6}", None, (200, 422)),
            ("POST", "/best:batch", asked, (200,)),
            ("GET", "/snapshot", None, (200,)),
            ("GET", "/ui", None, (200,)),
            ("GET", "/readyz", None, (200,)),
        ):
            reply = self.modest.request(method, path, json=body)
            assert reply.status_code in status, (path, reply.text)


@contextmanager
def serving(folder: Path, **more: Any) -> Iterator[Service]:
    settings = new_settings(folder, require_keys=True, **more)
    promote(settings, winner(KNOWN))
    with Store.open(settings.database) as store:
        keys = [store.keys.create(name, Scope.TUNE)[1] for name in ("greedy", "modest")]
    before = {*threading.enumerate()}
    with running(settings) as client, ExitStack() as opened:
        loop = next(thread for thread in threading.enumerate() if thread not in before)
        greedy, modest = (
            opened.enter_context(
                httpx.Client(
                    base_url=client.base_url,
                    headers={"Authorization": f"Bearer {key}"},
                    timeout=20,
                    limits=httpx.Limits(max_connections=None),
                )
            )
            for key in keys
        )
        yield Service(greedy=greedy, modest=modest, thread=loop)


def answered(links: list[socket.socket]) -> list[socket.socket]:
    return select.select(links, [], [], 0)[0]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for many tests."""
    with serving(tmp_path_factory.mktemp("one")) as started:
        yield started


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path) as started:
        yield started


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lasting]:
    with Lasting() as held:
        worked = fastapi.routing.run_in_threadpool

        async def work(*arguments: Any, **named: Any) -> Any:
            await worked(held)
            return await worked(*arguments, **named)

        monkeypatch.setattr(fastapi.routing, "run_in_threadpool", work)
        for owner, name in ((AnswerReader, "look_up"), (Snapshots, "current")):
            monkeypatch.setattr(owner, name, held.before(getattr(owner, name)))
        yield held


class Lasting:
    """What the greedy key asks for takes until the end of the test."""

    def __init__(self) -> None:
        self.begun = 0
        self._going_on = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._going_on.set()

    def __call__(self) -> None:
        """In a thread: wait, if it is the greedy key's."""
        if structlog.contextvars.get_contextvars().get("key") == "greedy":
            self.begun += 1
            assert self._going_on.wait(60)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def held(*arguments: Any, **named: Any) -> Any:
            self()
            return function(*arguments, **named)

        return held


def asking(*requests: tuple[str, str], body: bytes = b"") -> list[Asked]:
    """Those requests, as often as there are threads for them and some more."""
    return [(method, path, body) for method, path in requests] * (50 // len(requests) + 1)


FLOODS: dict[str, list[Asked]] = {
    "reads": asking(*(("GET", path) for path in READS)),
    "winners": asking(("GET", "/winners?limit=1000")),
    "orders": asking(("POST", "/tune"), body=b'{"m": 8, "n": 8, "k": 8}'),
    "other writes": asking(("DELETE", "/jobs/none"), ("POST", "/jobs/none/retry")),
    "lookups": [("GET", f"/best?m={m}&n=8&k=8", b"") for m in range(8, 408, 8)],
    "batches": asking(("POST", "/best:batch"), body=b'{"problems": [{"m": 8, "n": 8, "k": 8}]}'),
    "wrong batches": asking(("POST", "/best:batch"), body=b'{"problems": [1, 2, {}]}'),
    "snapshots": asking(("GET", "/snapshot")),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_others_are_answered_whatever_one_key_asks_for(
    service: Service, lasting: Lasting, flood: list[Asked]
) -> None:
    with ExitStack() as held:
        for method, path, body in flood:
            held.enter_context(service.ask(method, path, body))
        until(lambda: lasting.begun > 0, "nothing has begun")
        service.is_well()
        assert lasting.begun <= 4


def test_one_key_has_so_many_requests_under_way_and_others_theirs(
    tmp_path: Path, lasting: Lasting
) -> None:
    with serving(tmp_path, connections=80, client_connections=80) as service, ExitStack() as held:
        links = [held.enter_context(service.ask("GET", "/winners")) for _ in range(30)]
        # Of 80 connections, a quarter may be at work for one key.
        until(lambda: len(answered(links)) == 10, "not all others are refused")
        assert all(b"too-many-requests" in link.recv(4096) for link in answered(links))
        service.is_well()


def test_what_nobody_waits_for_any_more_is_not_begun(service: Service, lasting: Lasting) -> None:
    links = [service.ask("GET", "/winners") for _ in range(20)]
    until(lambda: lasting.begun == 2, "the share is another")
    time.sleep(0.2)
    for link in links:
        link.close()
    time.sleep(0.2)
    lasting.__exit__()
    assert service.greedy.get("/jobs").status_code == 200
    assert lasting.begun == 3


@pytest.mark.parametrize("path", ["/best:batch", "/tune"])
def test_bodies_that_do_not_end_leave_room_for_others(service: Service, path: str) -> None:
    size = 4 * 2**20 if path == "/best:batch" else 60_000
    with ExitStack() as held:
        links = []
        for _ in range(17 if path == "/best:batch" else 300):
            links.append(held.enter_context(service.ask("POST", path, b" " * (size - 1), size)))
        if path == "/best:batch":
            # 16 MiB are one key's.
            until(lambda: len(answered(links)) == 13, "not all others are refused")
            assert b"HTTP/1.1 429" in answered(links)[0].recv(4096)
        filler = b" " * (3 * 2**20)
        reply = service.modest.post(
            "/best:batch",
            content=b'{"problems": [{"m": 8, "n": 8, "k": 8}]' + filler + b"}",
            headers={"Content-Type": "application/json"},
        )
        assert reply.status_code == 200
        service.is_well()


def test_event_streams_are_counted_for_each_key_wherever_it_comes_from(tmp_path: Path) -> None:
    with serving(tmp_path, connections=64, client_connections=64) as service, ExitStack() as held:
        service.modest.post("/tune", json={"m": 8, "n": 8, "k": 8}).raise_for_status()
        heads = []
        for number in range(8):
            link = held.enter_context(
                service.ask("GET", "/jobs/latest/events", source=f"127.0.0.{1 + number}")
            )
            heads.append(link.recv(12))
        assert heads == [b"HTTP/1.1 200"] * 4 + [b"HTTP/1.1 429"] * 4
        with service.modest.stream("GET", "/jobs/latest/events") as stream:
            assert stream.status_code == 200


def many(number: int) -> bytes:
    return b"{" + b",".join(b'"x%d":1' % place for place in range(number)) + b"}"


LISTS = b"[" + b",".join([b"[]"] * 20_000) + b"]"
HOSTILE: dict[str, tuple[str, str, list[str], bytes]] = {
    "a query of many names": ("GET", "/jobs?" + "&".join(map(str, range(1600))), [], b""),
    "a lookup of many names": ("GET", "/best?" + "&".join(map(str, range(1600))), [], b""),
    "a query of nothing": ("GET", "/jobs?" + "&" * 8000, [], b""),
    "percents": ("GET", "/jobs?after=" + "%41" * 2600, [], b""),
    "many columns": ("GET", "/winners?fields=" + ",".join(["kernel"] * 140), [], b""),
    "media types": ("GET", "/winners", ["Accept: " + ",".join(["a/b;q=0.1"] * 2500)], b""),
    "tags": ("GET", f"/best?{QUERY}", ["If-None-Match: " + ",".join(['"x"'] * 7000)], b""),
    "backends": ("GET", f"/best?{QUERY}", ["Gemmsmith-Runs: " + "x " * 14_000], b""),
    "headers": ("GET", "/jobs", ["a:"] * 60_000, b""),
    "a long path": ("GET", "/jobs/" + "a/" * 3000, [], b""),
    "a long name": ("GET", "/kernels/" + "%41" * 2600, [], b""),
    "unknown members": ("POST", "/tune", [], many(5_500)),
    "very many unknown members": ("POST", "/tune", [], many(250_000)),
    "lists": ("POST", "/tune", [], b'{"m":' + LISTS + b"}"),
    "lists and an escape": ("POST", "/tune", [], b'{"\\u0041":' + LISTS + b"}"),
    "one member again and again": ("POST", "/tune", [], b"{" + b'"a":1,' * 8000 + b'"a":1}'),
    "a long text": ("POST", "/tune", [], b'{"device":"' + b"\\u0041" * 10_000 + b'"}'),
    "a long word": ("POST", "/tune", [], b'{"layout":"' + b"x" * 60_000 + b'"}'),
    "a batch of unknown members": ("POST", "/best:batch", [], many(250_000)),
    "a batch of lists": ("POST", "/best:batch", [], b'{"problems":' + LISTS + b"}"),
    "a form": ("POST", "/ui/tune", [FORM], b"a=&" * 20_000),
    "a form of anyone's": ("POST", "/ui/login", [FORM], b"a=&" * 5_000),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_no_request_takes_long_in_the_event_loop(
    one: Service, hostile: tuple[str, str, list[str], bytes]
) -> None:
    """By the time that its thread computes, against a request that is as it should be: 2 ms.

    To receive a long body takes as long as so many blanks. On a busy machine all take longer, and
    one of them may collect the garbage of the process.
    """
    method, path, headers, body = hostile
    blanks = method, path, headers, b" " * len(body)
    for _ in range(10):
        usual, _ = spent_on(one, ("GET", "/jobs", [], b""))
        received = max(0, spent_on(one, blanks)[0] - usual) if body else 0
        spent, answer = spent_on(one, hostile)
        assert len(answer) < 30_000
        if spent - received < max(0.006, 3 * usual):
            return
    pytest.fail(f"{1000 * spent:.1f} ms, and {1000 * usual:.1f} ms usually")


def spent_on(service: Service, asked: tuple[str, str, list[str], bytes]) -> tuple[float, bytes]:
    """Seconds for which the event loop's thread computes, and the answer."""
    method, path, headers, body = asked
    assert service.thread.ident is not None
    clock = time.pthread_getcpuclockid(service.thread.ident)
    began = time.clock_gettime(clock)
    with service.ask(method, path, body, headers=["Connection: close", *headers]) as link:
        answer = read_to_the_end(link)
    return time.clock_gettime(clock) - began, answer


def test_a_batch_of_nothing_but_faults_takes_little_of_the_event_loop(one: Service) -> None:
    assert one.thread.ident is not None
    clock = time.pthread_getcpuclockid(one.thread.ident)
    body = b'{"problems":[' + b",".join([b'{"m":1,"x":1}'] * 10_000) + b"]}"
    headers = {"Content-Type": "application/json"}
    for _ in range(10):
        began = time.clock_gettime(clock)
        reply = one.greedy.post("/best:batch", content=body, headers=headers)
        spent = time.clock_gettime(clock) - began
        assert len(reply.json()["answers"]) == 10_000
        if spent < 0.05:  # in many pieces
            return
    pytest.fail(f"{1000 * spent:.0f} ms")
