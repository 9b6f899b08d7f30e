"""Every error is one RFC 9457 problem document; nothing a client sends gives a 5xx."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmsmith.core.problem import DType, Layout
from service.lookup.devices import Arch
from service.settings import Settings, SettingsError
from service.worker.gpu import usable_gpu
from service.worker.process import device_name
from tests.support.replacing import replace
from tests.support.serving import H200, new_settings, promote, running, winner
from tests.unit.service.conftest import KNOWN
from tuner.arch import MEASURED
from tuner.errors import DatabaseBusy


def check_document(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = reply.json()
    assert document["status"] == reply.status_code
    assert document["type"].startswith("urn:gemmsmith:problem:")
    assert document["title"]
    assert document["detail"]
    return document


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/best/", 404),
        ("POST", "/best", 405),
        ("GET", "/tune", 405),
        ("PUT", "/jobs/x", 405),
        ("GET", "/jobs/none", 404),
        ("GET", "/jobs/none/events", 404),
        ("DELETE", "/jobs/none", 404),
        ("GET", "/jobs?after=none", 422),
        ("GET", "/jobs?state=asleep", 422),
        ("GET", "/jobs?limit=0", 422),
        ("GET", "/kernels/none", 404),
        ("GET", "/packs/none", 422),
        ("GET", "/packs/" + "0" * 64, 404),
        ("GET", "/packs/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/packs/" + "0" * 63 + "%0a", 422),
        ("GET", "/results?m=1", 422),
        ("GET", "/results?limit=1001", 422),
        ("GET", "/results?phase=third", 422),
    ],
)
def test_every_route_has_the_same_error_shape(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    reply = client.request(method, path)
    assert reply.status_code == status
    assert check_document(reply)["instance"].startswith("/")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/best", "GET, HEAD"),
        ("PATCH", "/jobs/latest", "DELETE, GET, HEAD"),
        ("PATCH", "/keys", "GET, HEAD, POST"),
        ("PATCH", "/ui/static/style.css", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_named(
    client: httpx.Client, method: str, path: str, allowed: str
) -> None:
    reply = client.request(method, path)
    assert reply.headers["allow"] == allowed
    assert allowed in reply.text


def test_what_is_wrong_as_a_whole_is_named_by_its_place(client: httpx.Client) -> None:
    def field(reply: httpx.Response) -> str:
        name: str = reply.json()["errors"][0]["field"]
        return name

    assert field(client.get("/results?m=1")) == "query"
    assert field(client.post("/tune", json=[])) == "body"
    asked = {"m": 1, "n": 1, "k": 1}
    assert field(client.post("/tune", json={**asked, "query": 1})) == "query"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 422),
        (b"[]", "application/json", 422),
        (b"null", "application/json", 422),
        (b'{"m":1,"n":1,"k":1}', "text/plain", 422),
        (b'{"m":1,"n":1,"k":1}', "application/x-www-form-urlencoded", 422),
        (b"\xff\xfe", "application/json", 400),
        (b'{"m":' + b"9" * 6000 + b',"n":1,"k":1}', "application/json", 400),
        (b"[" * 60_000, "application/json", 422),
        (b"[" * 100, "application/json", 400),
        (b"[" * 100_000, "application/json", 413),
    ],
)
def test_unreadable_bodies(client: httpx.Client, content: bytes, kind: str, status: int) -> None:
    reply = client.post("/tune", content=content, headers={"Content-Type": kind})
    assert reply.status_code == status
    check_document(reply)


def test_large_bodies_are_refused_whether_declared_or_not(client: httpx.Client) -> None:
    for path, limit in (("/best:batch", 2**20), ("/tune", 2**16), ("/jobs/x/retry", 2**16)):
        body = b" " * (limit + 1)
        declared = client.post(path, content=body)
        chunked = client.post(path, content=iter([body[: limit // 2]] * 3))
        for reply in (declared, chunked):
            assert reply.status_code == 413
            assert f"{limit} bytes" in check_document(reply)["detail"]


def test_a_fault_is_logged_and_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret inside")

    monkeypatch.setattr("service.lookup.find.find_many", broken)
    settings = new_settings(tmp_path)
    promote(settings, winner(KNOWN))
    with caplog.at_level(logging.ERROR), running(settings) as client:
        reply = client.get("/best?m=1&n=1&k=1", headers={"X-Request-Id": "abc-1"})
        assert reply.status_code == 500
        assert reply.headers["x-request-id"] == "abc-1"
        assert "secret" not in reply.text
        assert "abc-1" in check_document(reply)["detail"]
        route = '{method="GET",route="/best",status="500"}'
        assert f"gemmsmith_requests_total{route} 1.0" in client.get("/metrics").text


_TEXT = st.text(max_size=20)
_EXTENTS = st.one_of(st.integers(), st.integers(1, 2**15), st.floats(), _TEXT, st.booleans())


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    params=st.fixed_dictionaries(
        {"m": _EXTENTS, "n": _EXTENTS, "k": _EXTENTS},
        optional={
            "batch": _EXTENTS,
            "dtype": st.one_of(st.sampled_from(DType), _TEXT),
            "layout": st.one_of(st.sampled_from(Layout), _TEXT),
            "device": _TEXT,
            "exact": _TEXT,
        },
    )
)
def test_no_query_gives_a_fault(client: httpx.Client, params: dict[str, Any]) -> None:
    encodable = {
        name: str(value).encode("utf-8", "replace").decode() for name, value in params.items()
    }
    reply = client.get("/best", params=encodable)
    assert reply.status_code in (200, 404, 422)
    if reply.status_code != 200:
        check_document(reply)


def test_beyond_the_loopback_interface_keys_are_always_asked_for() -> None:
    assert not Settings.load({}).keys_required
    assert not Settings.load({"GEMMSMITH_HOST": "::1"}).keys_required
    assert Settings.load({"GEMMSMITH_REQUIRE_KEYS": "true"}).keys_required
    for host in ("0.0.0.0", "192.168.1.2", "example.com", "::"):
        assert Settings.load({}, host=host).keys_required
    with pytest.raises(SettingsError, match="GEMMSMITH_PORT"):
        Settings.load({"GEMMSMITH_PORT": "many"})


def test_callers_are_not_told_whose_process_keeps_them_waiting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise DatabaseBusy("locked: process 7 (sqlite3 --secret) holds a transaction open")

    monkeypatch.setattr("tuner.jobs.Queue.get", busy)
    with running(new_settings(tmp_path)) as client:
        reply = client.get("/jobs/one")
    assert reply.status_code == 503
    assert "secret" not in reply.text
    assert "nothing of this request was changed" in check_document(reply)["detail"]
    # Where it is logged depends on what set up this process's logs.
    assert "process 7" in capsys.readouterr().out + caplog.text


def test_the_accepted_architectures_are_those_of_the_space() -> None:
    assert {arch.value for arch in Arch} == set(MEASURED)


@pytest.mark.parametrize(("arch", "usable"), [("sm90", True), ("sm89", False)])
def test_a_gpu_without_kernels_does_not_hide_known_winners(
    monkeypatch: pytest.MonkeyPatch, arch: str, usable: bool
) -> None:
    model = replace(H200, arch=arch)
    monkeypatch.setattr("service.worker.gpu.local_gpu", lambda: model)
    assert usable_gpu() == (model if usable else None)
    assert device_name(Settings()).startswith("cuda:0" if usable else "replay:")
    assert device_name(Settings(device="replay:x")) == "replay:x"
