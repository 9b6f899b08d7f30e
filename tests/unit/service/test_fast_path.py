"""Both roads to an answer say the same, byte for byte.

Each request goes over a socket of its own, once as ever and once with the short cut closed.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from service.http import fast_path
from service.http.access import COOKIE, Scope
from service.lookup.cache import Answers
from service.settings import Settings
from tests.support.serving import H100, new_settings, promote, running, winner
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
SIZES = {"m": 4096, "n": 4096, "k": 4096}
QUERY = "m=4096&n=4096&k=4096"
LIMIT = 20_000


@dataclass(kw_only=True)
class Service:
    """A running service, and how often its short cut was taken."""

    http: httpx.Client
    patch: pytest.MonkeyPatch
    keys: dict[Scope, str]
    short: int = 0

    def raw(self, request: bytes) -> bytes:
        """The whole answer, without its date."""
        url = self.http.base_url
        with socket.create_connection((url.host, url.port or 80), timeout=20) as connection:
            connection.sendall(request)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        return re.sub(rb"date: [^\r]*\r\n", b"", received, count=1)

    def both(self, request: bytes) -> tuple[bytes, bool]:
        """What both roads answer to a request, and whether the short one was taken."""
        self.raw(request)  # into memory, if that is where it goes
        before = self.short
        fast = self.raw(request)
        taken = self.short > before
        with self.patch.context() as patch:
            patch.setattr(fast_path, "_best", _closed)
            slow = self.raw(request)
        assert fast == slow, request
        return fast, taken


async def _closed(*_: object) -> bool:
    return False


def starting(settings: Settings, keys: dict[Scope, str]) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.http.app.usable_gpu", lambda: None)
        answer = fast_path._answer
        with running(settings) as http:
            started = Service(http=http, patch=patch, keys=keys)

            async def counted(*args: Any, **more: Any) -> None:
                started.short += 1
                await answer(*args, **more)

            patch.setattr(fast_path, "_answer", counted)
            yield started


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = new_settings(tmp_path_factory.mktemp("open"), max_body_bytes=LIMIT)
    promote(
        settings,
        winner(KNOWN, us=190.0),
        winner(Problem(m=512, n=512, k=8192), use=Use.CUBLAS, us=14.0),
        winner(Problem(m=256, n=4096, k=4096, dtype=DType.FP8_E4M3), us=9.0),
        winner(KNOWN, device=H100, us=250.0),
    )
    return settings


@pytest.fixture(scope="module")
def service(settings: Settings) -> Iterator[Service]:
    """Without keys, on the loopback interface."""
    yield from starting(settings, {})


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that takes keys."""
    settings = new_settings(tmp_path_factory.mktemp("keyed"), require_keys=True)
    promote(settings, winner(KNOWN))
    with Store.open(settings.database) as store:
        keys = {scope: store.keys.create(f"has-{scope}", scope)[1] for scope in Scope}
        store.keys.revoke("has-admin")
    yield from starting(settings, keys)


def get(query: str = QUERY, *headers: str, method: str = "GET", path: str = "/best") -> bytes:
    head = [f"{method} {path}?{query} HTTP/1.1", "X-Request-Id: r-1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        head.insert(1, "Host: 127.0.0.1")
    return "\r\n".join([*head, "Connection: close", "", ""]).encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("query", "headers", "expected"),
    [
        (QUERY, (), 200),
        (QUERY + "&exact=true", (), 200),
        (f"{QUERY}&device={H100.slug}", (), 200),
        ("n=4096&k=4096&m=4096&arch=sm90&dtype=bf16&layout=tn&batch=1", (), 200),
        ("m=8192&n=4096&k=4096", (), 200),
        ("m=77&n=7000&k=640&dtype=fp16", (), 200),
        ("m=511&n=513&k=8191", (), 200),
        ("m=%34096&n=4096&k=4096", (), 200),
        (QUERY, ('If-None-Match: "other"',), 200),
        (QUERY, ("If-None-Match: *",), 304),
        (QUERY, ("IF-NONE-MATCH: {tag}",), 304),
        (QUERY, ('If-None-Match: "other", W/{tag}',), 304),
        (QUERY, ('If-None-Match: "other"', "If-None-Match: {tag}"), 200),
        (QUERY, ("If-None-Match: {tag}", 'If-None-Match: "other"'), 304),
        (QUERY, ("If-None-Match: \xff",), 200),
        (QUERY, ("Accept: text/html", "Accept-Encoding: gzip"), 200),
        (QUERY, ("Sec-Fetch-Site: cross-site", "Origin: https://elsewhere.example"), 200),
        (QUERY, ("Authorization: Bearer gsk_no-key",), 200),
        (QUERY, ("Host: localhost:1234",), 200),
    ],
)
def test_what_is_known_takes_the_short_road_and_says_the_same(
    service: Service, query: str, headers: tuple[str, ...], expected: int
) -> None:
    tag = service.http.get(f"/best?{QUERY}").headers["etag"]
    answer, taken = service.both(get(query, *(line.format(tag=tag) for line in headers)))
    assert status(answer) == expected
    assert taken
    assert b"x-request-id: r-1\r\n" in answer
    assert (b"\r\n\r\n{" in answer) == (expected == 200)


@pytest.mark.parametrize(
    ("query", "expected", "short"),
    [
        (QUERY, 200, True),
        (QUERY + "&exact=true", 200, True),
        (QUERY + "&exact=false&batch=1&dtype=bf16&layout=tn&arch=sm90", 200, True),
        (f"{QUERY}&device={H100.slug}", 200, True),
        ("m=8192&n=4096&k=4096", 200, True),
        ("m=77&n=7000&k=640&dtype=fp16", 200, True),
        ("m=64&m=77&n=7000&k=640&dtype=fp16", 422, False),
        ("m=8192&n=4096&k=4096&exact=true", 404, True),
        (QUERY + "&dtype=fp8_e4m3&layout=nn", 422, True),
        ("m=2147483647&n=2147483647&k=64", 422, True),
        ("m=2147483648&n=4096&k=64", 422, False),
        (QUERY + "&exact=1", 200, False),
        (QUERY + "&device=", 200, False),
        (QUERY + "&device=null", 422, False),
        (QUERY + "&arch=null", 422, False),
        (QUERY + "&arch=sm70", 422, False),
        (QUERY + "&dtype=null", 422, False),
        (QUERY + "&device=" + "v" * 201, 422, False),
        (QUERY + "&", 200, False),
        ("m=1e3&n=4096&k=4096", 422, False),
        ("m=04096&n=4096&k=4096", 200, False),
        ("m=+4096&n=4096&k=4096", 422, False),
        ("m=4096&n=4096", 422, False),
    ],
)
def test_what_was_never_asked_says_the_same(
    service: Service, query: str, expected: int, short: bool
) -> None:
    looked_up = fast_path._looked_up
    taken = []

    def seen(*args: Any) -> Any:
        taken.append(looked_up(*args))
        return taken[-1]

    with service.patch.context() as patch:
        patch.setattr(Answers, "asked", lambda *_: None)
        patch.setattr(Answers, "keep", lambda *_: None)
        patch.setattr(fast_path, "_looked_up", seen)
        answer, _ = service.both(get(query))
    assert (status(answer), bool(taken)) == (expected, short)


def test_what_was_asked_once_is_answered_from_memory(service: Service) -> None:
    query = "m=96&n=7000&k=640&dtype=fp16"
    first = service.raw(get(query))
    with service.patch.context() as patch:
        patch.setattr(fast_path, "_looked_up", None)
        assert service.raw(get(query)) == first


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (get("m=8192&n=4096&k=4096&exact=1"), 404),
        (get("m=8192&n=4096&k=4096&exact=true"), 404),
        (get("m=0&n=4096&k=4096"), 422),
        (get(QUERY + "&x=1"), 422),
        (get(QUERY + "&m=4096"), 422),
        (get(QUERY + "&device=voodoo-2"), 422),
        (get("m=2147483647&n=2147483647&k=64"), 422),
        (get(""), 422),
        (get(method="HEAD"), 200),
        (get(method="POST"), 405),
        (get(method="OPTIONS"), 405),
        (get(path="/best/"), 404),
        (get(path="/%62est"), 200),
        (get(QUERY, "Host: gemmsmith.example"), 421),
        (get(QUERY, "Host: 127.0.0.1", "Host: 127.0.0.1"), 421),
        (get(QUERY, "Host:"), 421),
        (get(QUERY + "&batch=1" * 500), 422),
        (get("m=" + "9" * 9000), 414),
        (b"GET /best?" + QUERY.encode() + b" HTTP/1.0\r\nX-Request-Id: r-1\r\n\r\n", 421),
    ],
)
def test_whatever_is_not_plain_says_the_same(
    service: Service, request_: bytes, expected: int
) -> None:
    service.raw(get())
    answer, _ = service.both(request_)
    assert status(answer) == expected


def test_keys_hold_on_both_roads(keyed: Service) -> None:
    def bearer(secret: str) -> str:
        return f"Authorization: Bearer {secret}"

    read, tune, revoked = (keyed.keys[scope] for scope in (Scope.READ, Scope.TUNE, Scope.ADMIN))
    page = "Accept: text/html"
    expected: dict[tuple[str, ...], int] = {
        (bearer(read),): 200,
        (bearer(tune),): 200,
        (f"Cookie: a=b; {COOKIE}={read}",): 200,
        (bearer(read), "Host: gemmsmith.example"): 200,
        (): 401,
        (page,): 303,
        (bearer(revoked),): 401,
        (bearer(read[:-1]),): 401,
        (bearer(""),): 401,
        (f"Authorization: Basic {read}", f"Cookie: {COOKIE}={read}"): 401,
        (f"Authorization: Basic {read}",): 401,
    }
    for headers, code in expected.items():
        answer, taken = keyed.both(get(QUERY, *headers))
        assert (status(answer), taken) == (code, code == 200), headers


def test_no_mangled_request_tells_the_roads_apart(service: Service) -> None:
    source = random.Random(1)

    def mangled(text: bytes) -> bytes:
        content = bytearray(text)
        for _ in range(source.choice((1, 1, 2, 5))):
            place = source.randrange(len(content))
            content[place : place + source.choice((0, 1))] = source.choice(
                (b"", b"0", b"&", b"%", b'"', b"}", b"9999999999", b"=", b",", b"m", b"exact", b"-")
            )
        return bytes(content)

    seen = set()
    for _ in range(60):
        queries = (QUERY, QUERY + "&exact=true&dtype=bf16")
        query = mangled(source.choice(queries).encode()).decode().replace('"', "%22")
        answer, taken = service.both(get(query))
        seen.add((status(answer), taken))
    assert {(200, True), (200, False), (400, False), (404, False), (422, False)} >= seen
    assert {(200, True), (422, False)} <= seen


def counters(service: Service) -> dict[str, float]:
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    return {
        sample.name + str(sorted(sample.labels.values())): sample.value
        for family in families
        if family.name in ("gemmsmith_lookups", "gemmsmith_answers", "gemmsmith_requests")
        or family.name in ("gemmsmith_request_seconds", "gemmsmith_answers_kept")
        for sample in family.samples
    }


def test_both_roads_are_counted_alike(service: Service) -> None:
    known = [get(), get("m=8192&n=4096&k=4096")]
    for request in known:
        service.raw(request)
    counted = []
    for closed in (False, True):
        before = counters(service)
        with service.patch.context() as patch:
            if closed:
                patch.setattr(fast_path, "_best", _closed)
            new = f"m=8&n=7000&k={640 + 16 * closed}&dtype=fp16"
            for request in [
                *known,
                get(new),
                get(new + "&exact=true"),
                get(new.replace("fp16", "null")),
            ]:
                service.raw(request)
        after = counters(service)
        changed = {name: value - before.get(name, 0) for name, value in after.items()}
        counted.append({name: by for name, by in changed.items() if by and "bucket" not in name})
    fast, slow = counted
    assert fast.pop("gemmsmith_request_seconds_sum['/best']") > 0
    assert slow.pop("gemmsmith_request_seconds_sum['/best']") > 0
    for found in counted:
        found.pop("gemmsmith_request_seconds_sum['/metrics']")
    assert fast == slow
    assert fast["gemmsmith_lookups_total['exact']"] == 1
    assert fast["gemmsmith_lookups_total['nearest']"] == 1
    assert fast["gemmsmith_lookups_total['predicted']"] == 1
    assert fast["gemmsmith_lookups_total['unknown']"] == 1
    assert fast["gemmsmith_answers_total['memory']"] == 2
    assert fast["gemmsmith_answers_total['database']"] == 2
    assert fast["gemmsmith_requests_total['/best', '200', 'GET']"] == 3
    assert counters(service)["gemmsmith_answers_kept[]"] > 0


def test_only_who_brings_an_id_is_in_the_log(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    lines = []
    with service.patch.context() as patch:
        patch.setattr("service.http.middleware.log.info", lambda event, **more: lines.append(more))
        for headers in ({}, {"X-Request-Id": "mine"}, {"X-Request-Id": "no id!"}):
            reply = service.http.get(f"/best?{QUERY}", headers=headers)
            assert re.fullmatch(r"mine|[0-9a-f]{16}", reply.headers["x-request-id"])
    assert [line["path"] for line in lines] == ["/best"]
