"""`POST /best:batch`: what its body may be, and that no body of it costs much."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import compress
from types import FrameType
from typing import Any

import httpx
import msgspec
import pytest

from gemmsmith.core.problem import DType, Problem
from service.errors import MOST_ERRORS, ProblemError
from service.http import batches
from tests.support.serving import H100, new_settings, promote, running, winner

KNOWN = Problem(m=4096, n=4096, k=4096)
SIZES = {"m": 4096, "n": 4096, "k": 4096}
LIMIT = 20_000
PROBLEMS: list[dict[str, Any]] = [
    SIZES,
    {**SIZES, "m": 8192},
    {"m": 77, "n": 7000, "k": 640, "dtype": "fp16"},
    {**SIZES, "batch": 1, "layout": "tn"},
    SIZES,
]
MISSHAPEN: list[Any] = [
    None,
    [],
    {**SIZES, "m": 0},
    {**SIZES, "m": 1.5},
    {**SIZES, "m": "1"},
    {**SIZES, "dtype": "fp8_e4m3", "layout": "nn"},
    {**SIZES, "x": 1},
    {**SIZES, "m": 2**31 - 1, "n": 2**31 - 1},
]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = new_settings(tmp_path_factory.mktemp("batches"), max_body_bytes=LIMIT)
    promote(
        settings,
        winner(KNOWN, us=190.0),
        winner(Problem(m=256, n=4096, k=4096, dtype=DType.FP8_E4M3), us=9.0),
        winner(KNOWN, device=H100, us=250.0),
    )
    with running(settings) as client:
        yield client


def post(
    http: httpx.Client, body: bytes | dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    return http.post("/best:batch", content=content, headers=sent)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"problems": PROBLEMS}, {}, 200),
        ({"problems": PROBLEMS, "device": H100.slug, "arch": "sm90"}, {}, 200),
        ({"problems": PROBLEMS, "exact": True}, {}, 200),
        ({"problems": PROBLEMS * 10, "device": None}, {}, 200),
        ({"problems": MISSHAPEN[-3:-2]}, {}, 200),
        ({"problems": MISSHAPEN[-1:]}, {}, 200),
        ({"problems": [*MISSHAPEN, *PROBLEMS]}, {}, 200),
        ({"problems": PROBLEMS, "exact": "yes"}, {}, 422),
        ({"problems": PROBLEMS, "exact": None}, {}, 422),
        ({"problems": PROBLEMS, "device": "voodoo-2"}, {}, 422),
        ({"problems": PROBLEMS, "device": "v" * 201}, {}, 422),
        ({"problems": PROBLEMS, "arch": "sm70"}, {}, 422),
        ({"problems": []}, {}, 422),
        ({"problems": [{}] * 10_000}, {}, 413),
        ({}, {}, 422),
        (b"", {}, 422),
        (b"{", {}, 400),
        (b'{"problems":[NaN]}', {}, 400),
        (b"\xff\xfe", {}, 400),
        ('{"problems":[null]}'.encode("utf-16"), {}, 400),
        ({"problems": PROBLEMS}, {"Content-Type": "text/plain"}, 422),
        ({"problems": PROBLEMS}, {"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"problems": PROBLEMS}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ({"problems": PROBLEMS}, {"Origin": "http://elsewhere.example"}, 403),
        ({"problems": PROBLEMS}, {"Host": "gemmsmith.example"}, 421),
    ],
)
def test_a_body_is_answered_or_refused(
    http: httpx.Client, body: bytes | dict[str, Any], headers: dict[str, str], expected: int
) -> None:
    reply = post(http, body, headers)
    assert reply.status_code == expected, reply.text
    if expected == 200:
        asked = json.loads(body)["problems"] if isinstance(body, bytes) else body["problems"]
        assert len(reply.json()["answers"]) == len(asked)
        assert int(reply.headers["content-length"]) == len(reply.content)
    else:
        assert reply.headers["content-type"] == "application/problem+json"


def test_a_batch_is_made_of_the_answers_to_each(http: httpx.Client) -> None:
    """To the byte, but for problems that only `GET /best` answers, with a prediction."""
    bodies = [http.get("/best", params=problem).content for problem in PROBLEMS]
    measured = [b'"match":"predicted"' not in body for body in bodies]
    assert {*measured} == {True, False}
    reply = post(http, {"problems": [*compress(PROBLEMS, measured)]})
    assert reply.content == b'{"answers":[' + b",".join(compress(bodies, measured)) + b"]}"
    answers = post(http, {"problems": PROBLEMS}).json()["answers"]
    assert ["match" in answer for answer in answers] == measured
    assert {answer["status"] for answer in answers if "match" not in answer} == {404}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"problems": [{"m": 1, "m": 1, "n": 1, "k": 1}]}', 422, "m: is given more than once"),
        (b'{"problems": [1], "problems": [2]}', 422, "problems: is given more than once"),
        (b'{"problems": [1], "pro\\u0062lems": [1]}', 422, "problems: is given more than once"),
        (b'{"exact": true, "problems": [{}], "exact": true}', 422, "exact: is given more"),
        (b'{"device": "[1]", "problems": [1], "exact": 7}', 422, "exact: Input should be a valid"),
        (b'{"problems": [{"dtype": "a\\u0000"}]}', 422, "problems.0.dtype: has a NUL"),
        (b'{"problems": [1, {"\\u0000": 1}]}', 422, "problems.1: has a member whose name has a"),
        (b'{"problems": [], "device": "\\u0000"}', 422, "device: has a NUL"),
        (b'{"problems": ["\xff"]}', 400, "is not JSON"),
        (b'{"problems": [1], "\xff": 1}', 400, "is not JSON"),
        (b'{"problems": [1]} x', 400, "is not JSON"),
        (b'{"problems": "' + b"x" * 5000 + b'"}', 422, "problems: Input should be a valid list"),
        (b'{"problems": null}', 422, "problems: Input should be a valid list"),
        (b'{"x": 1}', 422, "problems: is required; x: is not a known field"),
        (b'{"problems": [1], "body": 1, "query": 1}', 422, "body: is not a known field"),
        (b"[]", 422, "body: a JSON object is required"),
        (b"7", 422, "body: a JSON object is required"),
    ],
)
def test_what_is_wrong_with_a_body_is_named(
    http: httpx.Client, body: bytes, status: int, says: str
) -> None:
    reply = post(http, body)
    assert (reply.status_code, says in reply.json()["detail"]) == (status, True), reply.text


def many(number: int) -> bytes:
    return b"{" + b",".join(b'"x%d":1' % place for place in range(number)) + b"}"


def listing(*problems: bytes) -> bytes:
    return b'{"problems":[' + b",".join(problems) + b"]}"


FULL = json.dumps({**dict.fromkeys(("out", "scaling", "grouping", "epilogue")), **SIZES}).encode()
HOSTILE: dict[str, Callable[[], bytes]] = {
    "unknown members": lambda: many(250_000),
    "unknown members of a problem": lambda: listing(many(250_000)),
    "unknown members of problems": lambda: listing(*[many(12)] * 300),
    "long problems": lambda: listing(*[many(240)] * 300),
    "lists": lambda: listing(*[b"[]"] * 1_300_000),
    "numbers": lambda: listing(*[b"1"] * 2_000_000),
    "numbers below the limit": lambda: listing(*[b"1"] * 150_000),
    "a deep nest": lambda: b'{"problems":' + b"[" * 2_000_000,
    "escapes": lambda: listing(b'{"device":"' + b"\\u0041" * 650_000 + b'"}'),
    "escapes of problems": lambda: listing(*[b'{"dtype":"' + b"\\u0041" * 300 + b'"}'] * 2_000),
    "a string": lambda: b'{"problems":"' + b"x" * 4_000_000 + b'"}',
    "blanks": lambda: listing(FULL) + b" " * 4_000_000,
    "blanks between": lambda: listing(b"{}" + b" " * 3_900_000, b"{}"),
    "a number": lambda: b'{"problems":' + b"9" * 4_000_000 + b"}",
    "nothing but problems": lambda: listing(*[b"{}"] * 300),
    "problems": lambda: listing(*[FULL] * 10_000),
}


def passing_over_blanks() -> float:
    """Seconds of the processor for a body of 4 MB."""
    body = b" " * 4_000_000 + b"0"
    began = time.thread_time()
    msgspec.json.decode(body)
    return time.thread_time() - began


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_holds_pythons_lock_or_makes_a_long_answer(name: str) -> None:
    """Time within one call into C is time in which the event loop stands still.

    The parser takes 5 ms to pass over the blanks of the longest body, on a machine that is doing
    nothing else. No body takes three times as long.
    """
    body = HOSTILE[name]()
    longest, began = 0.0, 0.0

    def watch(_: FrameType, event: str, __: object) -> None:
        nonlocal longest, began
        if event == "c_call":
            began = time.thread_time()
        elif event in ("c_return", "c_exception"):
            longest = max(longest, time.thread_time() - began)

    def once() -> list[Problem | ProblemError]:
        sys.setprofile(watch)
        try:
            return [*batches.read(body).problems]
        except ProblemError as refusal:
            return [refusal]
        finally:
            sys.setprofile(None)

    for _ in range(10):
        longest = 0.0
        read = once()
        most = max(0.015, 3 * passing_over_blanks())
        if longest < most:
            break
    assert longest < most
    refused = [problem for problem in read if isinstance(problem, ProblemError)]
    assert len(refused) <= 10_000
    assert all(len(problem.errors) <= MOST_ERRORS for problem in refused)
    assert sum(len(json.dumps(problem.document("x"))) for problem in refused) < 2**25
