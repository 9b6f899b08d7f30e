"""What no handler sees: text that cannot be stored, things said twice, JSON that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.core.text import flaw, flaw_in
from tests.support.serving import H200, new_settings, promote, publish, running, winner
from tuner.backends import kernels
from tuner.compile import ArtifactStore

KNOWN = Problem(m=64, n=64, k=64)
SIZES = {"m": 64, "n": 64, "k": 64}


@pytest.fixture
def client(store_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """A service on each kind of database."""
    settings = new_settings(tmp_path, database=store_url)
    promote(settings, winner(KNOWN))
    with running(settings) as client:
        yield client


def test_what_text_has_wrong_with_it() -> None:
    assert flaw("naïve \U0001f600") is None
    assert flaw("a\0b") == "has a NUL character"
    assert flaw("a\ud800") == "has half of a surrogate pair"
    assert flaw_in({"a": [1, None, {"b": "fine"}]}) is None
    assert flaw_in({"a": [1, {"b": "\0"}]}) == ("a.1.b", "has a NUL character")
    assert flaw_in([{"\0": 1}]) == ("0", "has a member whose name has a NUL character")
    assert flaw_in("\udfff") == ("", "has half of a surrogate pair")


def test_nothing_ill_formed_gets_an_internal_error(client: httpx.Client) -> None:
    """Every one of these got a 500, on PostgreSQL or on both."""
    text = b'{"problems": [{"m": 1, "n": 1, "k": 1, "dtype": "\\ud800"}]}'
    json_type = {"Content-Type": "application/json"}
    slug = winner(KNOWN).device.slug
    form = f"/ui/problems/{slug}/bf16/tn/64x64x64/pin"
    for method, path, content, headers, field in [
        ("POST", "/best:batch", text, json_type, None),
        ("POST", form, b"revision=0", {"Content-Type": "application/x-www-form-urlencoded"}, None),
        ("GET", "/jobs/%00", None, {}, "path"),
        ("DELETE", "/jobs/%00", None, {}, "path"),
        ("POST", "/jobs/%00/retry", None, {}, "path"),
        ("GET", "/ui/jobs/%00", None, {}, None),
        ("GET", "/kernels/%00", None, {}, "path"),
        ("DELETE", "/keys/%00", None, {}, "path"),
        ("GET", "/jobs?after=%00", None, {}, "after"),
        ("GET", "/results?job=a%00b", None, {}, "job"),
        ("GET", "/audit?actor=%00", None, {}, "actor"),
        ("GET", "/winners/history?m=64&n=64&k=64&after=2147483648", None, {}, "after"),
        ("GET", "/jobs/latest/events?after=2147483648", None, {}, "after"),
    ]:
        reply = client.request(method, path, content=content, headers=headers)
        assert reply.status_code in (400, 422), (path, reply.text)
        if field is not None:
            assert [error["field"] for error in reply.json()["errors"]] == [field]
    job = client.post("/tune", json=SIZES).json()["id"]
    late = client.get(f"/jobs/{job}/events", headers={"Last-Event-ID": "2147483648"})
    assert late.json()["errors"][0]["field"] == "Last-Event-ID"
    assert 'status="5' not in client.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/best?m=1&n=1&k=1&m=2", "m", "is given more than once"),
        ("/best?m=1&n=1&k=1&%6d=2", "m", "is given more than once"),
        ("/jobs?limit=1&limit=1", "limit", "is given more than once"),
        ("/ui/map?k=1&k=2", "k", "is given more than once"),
        ("/jobs?after=%ff", "after", "is not UTF-8"),
        ("/jobs?after=%ed%a0%80", "after", "is not UTF-8"),
        ("/jobs/%ff", "path", "is not UTF-8"),
    ],
)
def test_queries_and_paths_say_a_thing_once_in_utf_8(
    sqlite_url: str, tmp_path: Path, path: str, field: str, says: str
) -> None:
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        reply = client.get(path)
    assert reply.status_code == 422
    if reply.headers["content-type"] == "application/problem+json":
        assert [error["field"] for error in reply.json()["errors"]] == [field]
    assert says in reply.text


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tune", b'{"m": 1, "n": 1, "k": 1, "m": 2}', 422, "m: is given more than once"),
        ("/tune", b'{"m": 1, "n": 1, "k": 1, "\\u006d": 2}', 422, "m: is given more than once"),
        ("/best:batch", b'{"problems": [{"m": 1, "m": 1, "n": 1, "k": 1}]}', 422, "m: is given"),
        ("/best:batch", b'{"exact": true, "problems": [{}], "exact": false}', 422, "exact: is"),
        ("/best:batch", b'{"problems": [{"dtype": "a\\u0000"}]}', 422, "problems.0.dtype: has a"),
        ("/tune", b'{"m": 1, "device": "\\ud800x"}', 400, "not JSON"),
        ("/tune", b'{"m": NaN}', 400, "not JSON"),
        ("/tune", '{"m": 1}'.encode("utf-16"), 400, "not JSON"),
        ("/tune", b'{"m": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        ("/tune", b"[" * 60_000, 422, "has too many values"),
        ("/best:batch", b'{"problems": ' + b"[" * 100_000, 400, "nested too deeply"),
    ],
)
def test_bodies_say_a_thing_once_in_json(
    sqlite_url: str, tmp_path: Path, path: str, body: bytes, status: int, says: str
) -> None:
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert client.get("/jobs").json()["jobs"] == []
    assert (reply.status_code, says in reply.json()["detail"]) == (status, True), reply.text


def test_forms_say_a_thing_once(sqlite_url: str, tmp_path: Path) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        for content in (b"m=1&n=1&k=1&m=2", b"m=1&n=1&k=1&device=%00", b"m=1&n=%ff&k=1"):
            assert client.post("/ui/tune", content=content, headers=form).status_code == 422
        assert client.get("/jobs").json()["jobs"] == []


def test_a_second_media_type_hides_nothing(sqlite_url: str, tmp_path: Path) -> None:
    twice = b'{"m": 1, "n": 1, "k": 1, "m": 2}'
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        for kinds in (("application/json", "text/plain"), ("text/plain", "application/json")):
            headers = [("Content-Type", kind) for kind in kinds]
            reply = client.post("/tune", content=twice, headers=headers)
            assert "m: is given more than once" in reply.json()["detail"]
        plain = {"Content-Type": "text/plain"}
        assert client.post("/ui/tune", content=b"m=1&n=1&k=1", headers=plain).status_code == 415
        assert client.get("/jobs").json()["jobs"] == []


def test_colons_and_escapes_in_a_body_are_no_repetition(sqlite_url: str, tmp_path: Path) -> None:
    asked = {"problems": [SIZES, {**SIZES, "dtype": "a:b:c"}, {**SIZES, "dtype": "\u0663é"}]}
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        for content in (json.dumps(asked), json.dumps(asked, ensure_ascii=False, indent=1)):
            reply = client.post(
                "/best:batch",
                content=content.encode(),
                headers={"Content-Type": "application/json"},
            )
            assert reply.status_code == 200
            assert [one.get("status") for one in reply.json()["answers"][1:]] == [422, 422]


def test_head_is_possible_wherever_get_is(sqlite_url: str, tmp_path: Path) -> None:
    settings = new_settings(tmp_path, database=sqlite_url)
    promote(settings, winner(KNOWN))
    pack = publish(ArtifactStore(settings.packs), kernels(KNOWN)[0])
    with running(settings) as client:
        job = client.post("/tune", json=SIZES).json()["id"]
        paths = (
            "/", "/best?m=64&n=64&k=64", "/best", "/snapshot", "/jobs", f"/jobs/{job}",
            f"/packs/{pack.hash}", "/results", "/winners?format=csv", "/devices", "/audit",
            "/healthz", "/docs", "/ui/jobs", "/ui/jobs/none", "/ui/static/style.css", "/nothing",
        )  # fmt: skip
        for path in paths:
            whole, head = client.get(path), client.head(path)
            assert head.content == b""
            assert head.status_code == whole.status_code, path
            for name in ("content-type", "content-length", "etag", "location"):
                assert head.headers.get(name) == whole.headers.get(name), (path, name)
        events = client.head(f"/jobs/{job}/events")  # of a waiting job: a GET would not end
        assert events.headers["content-type"].startswith("text/event-stream")
        refused = client.head("/tune")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "path", ["/ui/problems?device=", "/ui/map?device=&k=&dtype=", "/ui/jobs?after=&state="]
)
def test_a_field_that_a_form_leaves_empty_is_none(
    sqlite_url: str, tmp_path: Path, path: str
) -> None:
    with running(new_settings(tmp_path, database=sqlite_url)) as client:
        assert client.get(path).status_code == 200


def test_a_long_device_name_has_its_page(sqlite_url: str, tmp_path: Path) -> None:
    settings = new_settings(tmp_path, database=sqlite_url)
    device = replace(H200, name="NVIDIA " + "x" * 5000)
    promote(settings, winner(KNOWN, device=device))
    with running(settings) as client:
        assert client.get("/ui/devices").status_code == 200
