"""A service may send anything: only documented errors are raised, and the terminal is safe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import (
    Answer,
    AsyncClient,
    Bounds,
    Client,
    GemmsmithError,
    JobFailed,
    Problem,
    ServiceFault,
    TunedAnswer,
)
from tests.support.snapshots import row, snapshot
from tests.unit.client.misbehaving import Misbehaving, Say, job, misbehaving, never_wait, stream

EVIL = "\x1b]0;x\x07\x1b[2J\x9b2J\r\nINFO forged\u2028line \u202e \x7f"
PROBLEM = Problem(256, 4096, 4096)

CALLS: dict[str, Callable[[Client], Any]] = {
    "best": lambda client: client.best(256, 4096, 4096),
    "best_many": lambda client: client.best_many([PROBLEM]),
    "tune": lambda client: client.tune(256, 4096, 4096),
    "job_status": lambda client: client.job_status("j1"),
    "cancel": lambda client: client.cancel("j1"),
    "retry": lambda client: client.retry("j1"),
    "jobs": lambda client: list(client.jobs()),
    "devices": lambda client: client.devices(),
    "snapshot": lambda client: client.snapshot("nvidia-h200-132sm"),
    "history": lambda client: client.history(PROBLEM),
    "explain": lambda client: client.explain(PROBLEM),
    "pin": lambda client: client.pin(PROBLEM, 1),
    "results": lambda client: list(client.results()),
    "packs": lambda client: list(client.packs()),
    "signing_key": lambda client: client.signing_key(),
    "job_events": lambda client: list(client.job_events("j1")),
}
EACH = pytest.mark.parametrize("call", CALLS)


def listing(*rows: Any) -> bytes:
    """A page of every listing."""
    names = ("jobs", "answers", "devices", "trials", "packs", "revisions", "winners")
    return json.dumps(dict.fromkeys(names, rows)).encode()


DEEP: Any = {}
for _ in range(900):
    DEEP = [DEEP]

ODD = [
    b"",
    b"\xff\xfe<html>",
    b"null",
    b"1e999",
    b"9" * 10_000,
    b"[]",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    listing(1),
    listing([[]]),
    listing({}),
    listing({"problem": DEEP}),
    listing({"title": "x", "status": "x"}),
    listing({"title": "x", "status": []}),
    b'{"title":"\\ud800","detail":"\\udfff","key":"\\ud800","id":"\\ud800"}',
    b'{"schema":"x","jobs":[],"trials":[],"packs":[],"revisions":[]}',
    b'{"format":1,"device":"d","revision":"r","winners":[],"signature":{"key":3}}',
]


@pytest.fixture
def client(server: Misbehaving, tmp_path: Path) -> Iterator[Client]:
    with Client(server.url, timeout=5, retries=0, cache_dir=tmp_path) as opened:
        never_wait(opened)
        yield opened


@EACH
def test_odd_documents_raise_documented_errors(
    client: Client, server: Misbehaving, call: str
) -> None:
    for body in ODD:
        for status in (200, 400, 404, 503):
            server.say(Say(status, body, {"Content-Type": "application/json"}))
            with contextlib.suppress(GemmsmithError):
                CALLS[call](client)


HEADERS = [
    {"ETag": "\x80é"},
    {"ETag": "a b\tc"},
    {"Retry-After": "nan"},
    {"Location": "http://xn--a.x/"},
    {"Location": "http://["},
    {"Location": "\x80"},
    {"Content-Type": "\x80"},
    {"Gemmsmith-Since": "\x80"},
    {"Set-Cookie": "a=b; Max-Age=99999999999999999999; Expires=x"},
    {"Content-Encoding": "\x80"},
]


@EACH
def test_odd_headers_raise_documented_errors(
    client: Client, server: Misbehaving, served: Say, call: str
) -> None:
    for headers in HEADERS:
        for status in (200, 302, 404):
            server.say(Say(status, served.body, headers))
            for _ in range(2):  # the second time with the cache of the first time
                with contextlib.suppress(GemmsmithError):
                    CALLS[call](client)


def shown(error: GemmsmithError) -> list[str]:
    """The lines of a traceback, including those of the error's causes."""
    return "".join(traceback.format_exception(error)).split("\n")


@EACH
def test_a_services_text_is_a_single_line(
    client: Client, server: Misbehaving, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    document = {"title": EVIL, "detail": EVIL * 1000, "problem": EVIL}
    caplog.set_level(logging.DEBUG)
    for status in (302, 400, 401, 403, 404, 409, 422, 429, 500, 503):
        server.say(Say(status, json.dumps(document).encode(), {"Retry-After": "1000"}))
        with pytest.raises(GemmsmithError) as caught:
            CALLS[call](client)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 25_000
        assert all(map(str.isprintable, shown(caught.value)))
    assert all(record.getMessage().isprintable() for record in caplog.records)


@pytest.mark.parametrize("field", ["dtype", "layout", "m", "unknown"])
def test_an_unknown_answer_is_a_message_of_one_line(
    client: Client,
    server: Misbehaving,
    answer: Answer,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    document = answer.to_dict()
    document["problem"] |= {field: EVIL}
    status = json.loads(job("done").body) | {"problem": document["problem"]}
    evil = {"name": EVIL}
    for body in (document, {"answers": [document]}, status, {"jobs": [status], "devices": [evil]}):
        server.say(Say(body=json.dumps(body).encode()))
        for ask in CALLS.values():
            try:
                ask(client)
            except GemmsmithError as error:
                assert all(map(str.isprintable, shown(error)))  # noqa: PT017
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_a_failed_job_is_a_message_of_one_line(client: Client, server: Misbehaving) -> None:
    failed = job("failed", error=EVIL)
    server.say(job("waiting"), stream((1, "failed", {"error": EVIL})), failed)
    handle = client.tune(256, 4096, 4096)
    with pytest.raises(JobFailed) as caught:
        handle.wait(timeout=20)
    assert str(caught.value).isprintable()
    assert "INFO forged" in str(caught.value)


def test_odd_values_of_events_change_nothing(
    client: Client, server: Misbehaving, served: Say, answer: Answer
) -> None:
    events = []
    for name in ("phase", "done", "total", "best_us", "best", "error", "device", "kind"):
        events += [(1, "progress", {name: value}) for value in ("x", [], {}, True, -1, 1e300)]
    last = job("done", winner_revision=1)
    server.say(job("running"), stream(*events, (2, "finished", {})), last, served)
    result = client.tune(256, 4096, 4096).wait(timeout=20, progress=True)
    assert result == TunedAnswer.of(answer, answer)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_no_cookies_are_kept(kind: type, server: Misbehaving) -> None:
    server.say(Say(body=b'{"devices": []}', headers={"Set-Cookie": f"a={'b' * 5000}"}))

    async def both() -> None:
        async with AsyncClient(server.url, cache_dir=None) as client:
            await client.devices()
            await client.devices()

    if kind is AsyncClient:
        asyncio.run(both())
    else:
        with Client(server.url, cache_dir=None) as client:
            client.devices()
            client.devices()
    assert len(server.seen) == 2
    assert "cookie" not in server.seen[1].headers


def test_an_events_identifier_is_sent_back_if_it_can_be(server: Misbehaving) -> None:
    for identifier in ("é", "\x1b[2J", "1"):
        body = f"id: {identifier}\nevent: progress\ndata: {{}}\n\n".encode()
        server.say(
            Say(200, body, {"Content-Type": "text/event-stream"}),
            job("running"),
            stream((2, "finished", {})),
        )
        with Client(server.url, cache_dir=None) as client:
            never_wait(client)
            kinds = [event.kind for event in client.job_events("j1") if event]
        assert kinds == ["progress", "finished"]


def test_a_jobs_identifier_is_part_of_a_path(client: Client, server: Misbehaving) -> None:
    for identifier in ("a b", "../keys", "j?x=1#y", "\x1b", "é", "a\r\nb"):
        server.say(Say(body=json.dumps(json.loads(job("done").body) | {"id": identifier}).encode()))
        assert client.job_status(identifier).id == identifier
        path = server.seen[-1].path
        assert path.startswith("/jobs/")
        assert path.count("/") == 2
        assert "?" not in path


LINKS: list[Any] = [
    "/jobs?after=2",
    "http://elsewhere.test/jobs?after=2",
    "jobs?after=2",
    "",
    "?after=2",
    "//{evil}/jobs",
    "http://{evil}/jobs",
    "x:http://{evil}/jobs",
    "x:@{evil}/jobs",
    "@{evil}/jobs",
    "/@{evil}/jobs",
    "/\\{evil}/jobs",
    "http://[/jobs",
    "/jobs?path=x&after=2",
    "/jobs?" + "x" * 100_000,
    "/" + "x" * 100_000,
    "/\x1b[2J",
    "/a\r\nb: c",
    "/\ud800",
    "/%0a%00",
    5,
    None,
    [],
    {"href": "/jobs"},
]


def test_a_listing_stays_on_its_server(client: Client, server: Misbehaving) -> None:
    listed = json.loads(job("done").body)
    last = Say(body=json.dumps({"jobs": []}).encode())
    with misbehaving() as evil:
        evil.say(Say(body=b"{}"))
        for link in LINKS:
            if isinstance(link, str):
                link = link.replace("{evil}", evil.url.removeprefix("http://"))
            for links in ({"next": {"href": link}}, {"next": link}, link):
                server.seen.clear()
                server.say(Say(body=json.dumps({"jobs": [listed], "links": links}).encode()), last)
                with contextlib.suppress(GemmsmithError):
                    list(client.jobs())
                assert len(server.seen) in (1, 2)
        assert evil.seen == []


def test_a_listing_has_so_many_bytes(client: Client, server: Misbehaving) -> None:
    def page(number: int) -> Say:
        links = {"next": {"href": f"/results?after={number}"}}
        return Say(body=json.dumps({"trials": [{"x": "y" * 1000}], "links": links}).encode())

    server.say(*(page(number) for number in range(99)))
    with (
        Client(server.url, cache_dir=None, bounds=Bounds(listing_bytes=5000)) as bounded,
        pytest.raises(ServiceFault, match=r"bounds=Bounds\(listing_bytes="),
    ):
        list(bounded.results())
    assert len(server.seen) == 5


WRONG: dict[str, dict[str, Any]] = {
    "problem": {"problem": {"m": 512, "n": 4096, "k": 4096}},
    "batch": {"problem": {"m": 256, "n": 4096, "k": 4096, "batch": 2}},
    "types": {"problem": {"m": 256, "n": 4096, "k": 4096, "dtype": "fp16"}},
    "layout": {"problem": {"m": 256, "n": 4096, "k": 4096, "layout": "nt"}},
    "device": {"device": {"name": "NVIDIA H100 80GB HBM3"}},
    "SMs": {"device": {"sm_count": 114}},
    "match": {"match": "nearest"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_to_another_problem_is_refused(
    client: Client, server: Misbehaving, answer: Answer, wrong: str
) -> None:
    other = answer.to_dict()
    for name, value in WRONG[wrong].items():
        other[name] = other[name] | value if isinstance(value, dict) else value
    ask = {"device": "nvidia-h200-132sm", "exact": True}
    server.say(Say(body=json.dumps(other).encode()))
    with pytest.raises(ServiceFault, match="Wrong answer"):
        client.best(256, 4096, 4096, **ask)
    server.say(Say(body=json.dumps({"answers": [other]}).encode()))
    with pytest.raises(GemmsmithError, match="Wrong answer"):
        client.best_many([PROBLEM], **ask)
    revision = {"answer": other, "origin": "measured", "current": True}
    if wrong != "match":
        server.say(Say(body=json.dumps({"revisions": [revision]}).encode()))
        with pytest.raises(ServiceFault, match="Wrong answer"):
            client.history(PROBLEM, device="nvidia-h200-132sm")
        server.say(Say(body=json.dumps(revision).encode()))
        with pytest.raises(ServiceFault, match="Wrong answer"):
            client.unpin(PROBLEM, device="nvidia-h200-132sm")
    # The cached answer is returned instead.
    server.say(Say(body=json.dumps(answer.to_dict()).encode()))
    assert client.best(256, 4096, 4096, **ask) == answer
    server.say(Say(body=json.dumps(other).encode()))
    assert client.best(256, 4096, 4096, **ask) == answer
    assert client.best_many([PROBLEM], **ask) == [answer]


@pytest.mark.parametrize(
    "device", ["nvidia-h200-132sm", "h200", "NVIDIA H200", "NVIDIA H200, 132 SMs"]
)
def test_a_device_has_shorter_names(
    client: Client, server: Misbehaving, answer: Answer, device: str
) -> None:
    server.say(Say(body=json.dumps(answer.to_dict()).encode()))
    assert client.best(256, 4096, 4096, device=device) == answer


def test_a_snapshot_of_another_device_is_refused(client: Client, server: Misbehaving) -> None:
    server.say(Say(body=snapshot(row(PROBLEM)).document))
    with pytest.raises(ServiceFault, match="Wrong answer"):
        client.snapshot("nvidia-b200-148sm")


def test_a_job_with_another_identifier_is_refused(client: Client, server: Misbehaving) -> None:
    server.say(job("waiting"))
    with pytest.raises(ServiceFault, match="Wrong answer"):
        client.tune(512, 4096, 4096)
    with pytest.raises(ServiceFault, match="Wrong answer"):
        client.job_status("j2")
    with pytest.raises(ServiceFault, match="Wrong answer"):
        client.cancel("j2")
    assert client.job_status("latest").id == "j1"
