"""What `GET /best` takes: which queries are answered, and what is wrong with the others.

Each request goes over a socket of its own, so that it arrives as it is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gemmsmith.core.config import Use
from gemmsmith.core.problem import DType, Problem
from service.http.access import COOKIE, Scope
from service.http.routes import best
from service.settings import Settings
from tests.support.serving import H100, new_settings, promote, running, winner
from tests.support.wire import connect, read_to_the_end
from tuner.store import Store

KNOWN = Problem(m=4096, n=4096, k=4096)
QUERY = "m=4096&n=4096&k=4096"
EXTENT = "(accepted: an integer in 1 … 2147483647)"
BOOLEAN = "Input should be a valid boolean, unable to interpret input"
UNKNOWN = "is not a known field; check its spelling"
DTYPES = "(accepted: bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32)"


@dataclass(kw_only=True)
class Service:
    """A running service."""

    http: httpx.Client
    patch: pytest.MonkeyPatch
    keys: dict[Scope, str]

    def raw(self, request: bytes) -> bytes:
        """The whole answer."""
        with connect(self.http) as connection:
            connection.sendall(request)
            return read_to_the_end(connection)


def starting(settings: Settings, keys: dict[Scope, str]) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch, running(settings) as http:
        yield Service(http=http, patch=patch, keys=keys)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Without keys, on the loopback interface."""
    settings = new_settings(tmp_path_factory.mktemp("open"))
    promote(
        settings,
        winner(KNOWN, us=190.0),
        winner(Problem(m=512, n=512, k=8192), use=Use.CUBLAS, us=14.0),
        winner(Problem(m=256, n=4096, k=4096, dtype=DType.FP8_E4M3), us=9.0),
        winner(KNOWN, device=H100, us=250.0),
    )
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
    ("headers", "expected"),
    [
        ((), 200),
        (('If-None-Match: "other"',), 200),
        (("If-None-Match: *",), 304),
        (("IF-NONE-MATCH: {tag}",), 304),
        (('If-None-Match: "other", W/{tag}',), 304),
        (('If-None-Match: "other"', "If-None-Match: {tag}"), 200),
        (("If-None-Match: {tag}", 'If-None-Match: "other"'), 304),
        (("If-None-Match: \xff",), 200),
        (("Accept: text/html", "Accept-Encoding: gzip"), 200),
        (("Sec-Fetch-Site: cross-site", "Origin: https://elsewhere.example"), 200),
        (("Authorization: Bearer gsk_no-key",), 200),
        (("Host: localhost:1234",), 200),
        (("Host: gemmsmith.example",), 421),
        (("Host: 127.0.0.1", "Host: 127.0.0.1"), 421),
        (("Host:",), 421),
    ],
)
def test_headers_of_a_question_count(
    service: Service, headers: tuple[str, ...], expected: int
) -> None:
    """Also when the answer comes from memory, as the second one does."""
    tag = service.http.get(f"/best?{QUERY}").headers["etag"]
    for _ in range(2):
        answer = service.raw(get(QUERY, *(line.format(tag=tag) for line in headers)))
        assert status(answer) == expected
        assert b"x-request-id: r-1\r\n" in answer
        assert (b"\r\n\r\n{" in answer) == (expected != 304)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (get(QUERY + "&exact=true"), 200),
        (get(f"{QUERY}&device={H100.slug}"), 200),
        (get("n=4096&k=4096&m=4096&arch=sm90&dtype=bf16&layout=tn&batch=1&exact=false"), 200),
        (get("m=8192&n=4096&k=4096"), 200),
        (get("m=77&n=7000&k=640&dtype=fp16"), 200),
        (get("m=511&n=513&k=8191"), 200),
        (get("m=%34096&n=4096&k=4096"), 200),
        (get("m=04096&n=4096&k=4096"), 200),
        (get(QUERY + "&exact=1"), 200),
        (get(QUERY + "&exact=oN"), 200),
        (get(QUERY + "&device="), 200),
        (get(QUERY + "&"), 200),
        (get(QUERY + "&dtype=BF16&layout=TN"), 200),
        (get(QUERY + "&accumulate=yes&out=f32"), 200),
        (get(method="HEAD"), 200),
        (get(path="/%62est"), 200),
        (get("m=8192&n=4096&k=4096&exact=true"), 404),
        (get("m=8192&n=4096&k=4096&exact=1"), 404),
        (get(path="/best/"), 404),
        (get(method="POST"), 405),
        (get(method="OPTIONS"), 405),
        (get("m=" + "9" * 9000), 414),
        (b"GET /best?" + QUERY.encode() + b" HTTP/1.0\r\nX-Request-Id: r-1\r\n\r\n", 421),
        (get(""), 422),
        (get("m=4096&m=4096&n=4096&k=4096"), 422),
        (get(QUERY + "&batch=1" * 500), 422),
        (get(QUERY + "&device=voodoo-2"), 422),
        (get(QUERY + "&dtype=fp8_e4m3&layout=nn"), 422),
        (get("m=2147483647&n=2147483647&k=64"), 422),
    ]
    # What may be left out of a query is null only in JSON.
    + [
        (get(f"{QUERY}&{name}=null"), 422)
        for name in (
            *("arch", "device", "dtype", "layout", "batch", "groups", "exact", "accumulate"),
            *("out", "scaling", "grouping", "epilogue"),
        )
    ],
)
def test_a_question_is_answered_or_refused(
    service: Service, request_: bytes, expected: int
) -> None:
    first, second = service.raw(request_), service.raw(request_)
    assert (status(first), status(second)) == (expected, expected)


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("", "m: is required; n: is required; k: is required"),
        ("m=0&n=1&k=1", f"m: is out of range: 0 {EXTENT}"),
        ("m=2147483648&n=1&k=1", f"m: is out of range: 2147483648 {EXTENT}"),
        ("m=-5&n=1&k=1", f"m: is out of range: -5 {EXTENT}"),
        ("m=1e3&n=1&k=1", f"m: must be an integer, got '1e3' {EXTENT}"),
        ("m=+4096&n=1&k=1", f"m: must be an integer, got ' 4096' {EXTENT}"),
        (QUERY + "&groups=", f"groups: must be an integer, got '' {EXTENT}"),
        (QUERY + "&layout=xx", "layout: unknown: 'xx' (accepted: 'tn', 'tt', 'nt' or 'nn')"),
        (QUERY + "&arch=sm70", "arch: unknown: 'sm70'; did you mean sm90? (accepted: 'sm90')"),
        (QUERY + "&grouping=row", "grouping: unknown: 'row'; did you mean rows? (accepted: 'none', "
         "'rows' or 'depth')"),
        (QUERY + "&dtype=bf", f"dtype: unknown: 'bf'; did you mean bf16? {DTYPES}"),
        (QUERY + "&dtype=fp8_e4m3.scale_x", "dtype: scaling must be one of none, tensor, row, "
         f"block, got 'x' {DTYPES}"),
        (QUERY + "&groups=8", "groups: groups needs grouping=rows or grouping=depth"),
        (QUERY + "&exact=2", f"exact: {BOOLEAN}"),
        (QUERY + "&accumulate=", f"accumulate: {BOOLEAN}"),
        (QUERY + "&device=" + "v" * 201, "device: String should have at most 200 characters"),
        (QUERY + "&x=1&y=2", f"x: {UNKNOWN}; y: {UNKNOWN}"),
        (QUERY + "&=1", f"query: {UNKNOWN}"),
        ("x=1&k=0&n=a&arch=&out=&m=1", "out: unknown: '' (accepted: 'bf16', 'f16', 'e4m3', 'e5m2', "
         "'s8', 'tf32', 'f32' or 's32'); n: must be an integer, got 'a' "
         f"{EXTENT}; k: is out of range: 0 {EXTENT}; arch: unknown: '' (accepted: 'sm90'); "
         f"x: {UNKNOWN}"),
    ],
)  # fmt: skip
def test_everything_that_is_wrong_with_a_query_is_named(
    service: Service, query: str, detail: str
) -> None:
    reply = service.http.get(f"/best?{query}")
    assert (reply.status_code, reply.json()["detail"]) == (422, detail)


def test_what_was_asked_once_is_answered_from_memory(service: Service) -> None:
    query = "m=96&n=7000&k=640&dtype=fp16"
    first = service.http.get(f"/best?{query}")
    with service.patch.context() as patch:
        patch.setattr(best, "_look_up", None)
        assert service.http.get(f"/best?{query}").content == first.content


def test_a_question_needs_a_key_that_may_read(keyed: Service) -> None:
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
        assert status(keyed.raw(get(QUERY, *headers))) == code, headers


def counters(service: Service) -> dict[str, float]:
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    return {
        sample.name + str(sorted(sample.labels.values())): sample.value
        for family in families
        if family.name in ("gemmsmith_lookups", "gemmsmith_answers", "gemmsmith_requests")
        or family.name in ("gemmsmith_request_seconds", "gemmsmith_answers_kept")
        for sample in family.samples
    }


def test_questions_are_counted_by_their_answers(service: Service) -> None:
    known = [get(), get("m=8192&n=4096&k=4096")]
    for request in known:
        service.raw(request)
    before = counters(service)
    new = "m=8&n=7000&k=640&dtype=fp16"
    for request in [
        *known,
        get(new),
        get(new + "&exact=true"),
        get(new.replace("fp16", "null")),
        get(method="POST"),
    ]:
        service.raw(request)
    after = counters(service)
    counted = {name: value - before.get(name, 0) for name, value in after.items()}
    assert counted["gemmsmith_request_seconds_sum['/best']"] > 0
    assert counted["gemmsmith_lookups_total['exact']"] == 1
    assert counted["gemmsmith_lookups_total['nearest']"] == 1
    assert counted["gemmsmith_lookups_total['predicted']"] == 1
    assert counted["gemmsmith_lookups_total['unknown']"] == 1
    assert counted["gemmsmith_answers_total['memory']"] == 2
    assert counted["gemmsmith_answers_total['database']"] == 2
    assert counted["gemmsmith_requests_total['/best', '200', 'GET']"] == 3
    assert counted["gemmsmith_requests_total['/best', '404', 'GET']"] == 1
    assert counted["gemmsmith_requests_total['/best', '405', 'POST']"] == 1
    assert counted["gemmsmith_requests_total['/best', '422', 'GET']"] == 1
    assert after["gemmsmith_answers_kept[]"] > 0


def test_only_who_brings_an_id_is_in_the_log(service: Service) -> None:
    lines = []
    service.http.get(f"/best?{QUERY}")
    with service.patch.context() as patch:
        patch.setattr("service.http.middleware.log.info", lambda event, **more: lines.append(more))
        for headers in ({}, {"X-Request-Id": "mine"}, {"X-Request-Id": "no id!"}):
            reply = service.http.get(f"/best?{QUERY}", headers=headers)
            assert re.fullmatch(r"mine|[0-9a-f]{16}", reply.headers["x-request-id"])
    assert [line["path"] for line in lines] == ["/best"]
