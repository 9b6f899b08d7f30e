"""Keys, scopes, and what is refused to whom; against the real server and database."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.http.access import Scope
from service.http.app import create_app
from service.http.lookup_routes import LookupRoute
from service.settings import Settings
from tests.support.openapi import routes
from tests.support.processes import until
from tests.support.serving import Keyed, keyed, new_settings, pages

PUBLIC = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/signing-key"),
    ("GET", "/ui/login"),
    ("POST", "/ui/login"),
    ("POST", "/ui/logout"),
}
"""What anyone may see. Style sheets and pictures under /ui/static are as public as their source."""


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return new_settings(tmp_path_factory.mktemp("keyed"), require_keys=True)


@pytest.fixture(scope="module")
def service(locked: Settings) -> Iterator[Keyed]:
    """A service with a key of each scope, which has the scope's name."""
    with keyed(locked, **{scope.value: scope for scope in Scope}) as running:
        yield running


def scope_of(route: Any) -> Scope | None:
    if isinstance(route, LookupRoute):
        return route.needs
    dependencies = getattr(getattr(route, "dependant", None), "dependencies", [])
    scopes = [scope for found in dependencies if (scope := getattr(found.call, "scope", None))]
    return scopes[0] if scopes else None


def test_no_route_is_without_a_scope_but_the_public_ones(locked: Settings) -> None:
    found = [*routes(create_app(locked).routes)]
    assert len(found) > 15
    without = {(method, path) for method, path, route in found if scope_of(route) is None}
    assert without <= PUBLIC


def test_changes_take_more_than_reading(locked: Settings) -> None:
    lookups = {"/best:batch"}
    for method, path, route in routes(create_app(locked).routes):
        if method != "GET" and path not in lookups and (method, path) not in PUBLIC:
            assert scope_of(route) in (Scope.TUNE, Scope.ADMIN), path


def test_every_route_refuses_who_brings_no_key(service: Keyed, locked: Settings) -> None:
    for method, path, _ in routes(create_app(locked).routes):
        if (method, path) in PUBLIC:
            continue
        reply = service.http.request(method, re.sub(r"\{.*?\}", "x", path))
        assert reply.status_code == 401, (method, path)
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "gemmsmith keys create" in reply.text


def test_the_openapi_document_says_which_routes_take_a_key(service: Keyed) -> None:
    document = service.ask("GET", "/openapi.json", Scope.READ).json()
    schemes = document["components"]["securitySchemes"]
    assert schemes["HTTPBearer"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            public = (method.upper(), path) in PUBLIC
            assert operation.get("security", []) == ([] if public else [{"HTTPBearer": []}]), path


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_takes_no_key(service: Keyed, path: str) -> None:
    assert service.http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", "/jobs", Scope.READ),
        ("GET", "/metrics", Scope.READ),
        ("GET", "/docs", Scope.READ),
        ("POST", "/tune", Scope.TUNE),
        ("DELETE", "/jobs/none", Scope.TUNE),
        ("GET", "/keys", Scope.ADMIN),
        ("POST", "/keys", Scope.ADMIN),
        ("DELETE", "/keys/none", Scope.ADMIN),
        ("GET", "/audit", Scope.ADMIN),
    ],
)
def test_a_wider_scope_opens_what_a_narrower_one_does(
    service: Keyed, method: str, path: str, needed: Scope
) -> None:
    for scope in Scope:
        reply = service.ask(method, path, scope)
        if needed in scope.included:
            assert reply.status_code not in (401, 403)
        else:
            assert reply.status_code == 403
            document = reply.json()
            assert document["type"] == "urn:gemmsmith:problem:forbidden"
            assert f"lacks the scope {needed}" in document["detail"]
            assert f'scope="{needed}"' in reply.headers["www-authenticate"]


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer gsk_unknown",
        "Basic Z3NrOg==",
        "gsk_unknown",
        "Bearer " + "x" * 5000,
        "Bearer \xff\xfe".encode("latin-1"),
    ],
)
def test_what_is_no_key_is_refused(service: Keyed, value: str | bytes) -> None:
    reply = service.http.get("/jobs", headers={"Authorization": value})
    assert reply.status_code == 401
    assert reply.headers["content-type"] == "application/problem+json"


def test_a_key_with_something_to_it_is_another_key(service: Keyed) -> None:
    good = service.keys[Scope.READ]
    for bad in (good[:-1], good + "x", good.upper(), good + " x"):
        assert service.ask("GET", "/jobs", bad).status_code == 401
    assert service.http.get("/jobs", headers={"Authorization": f"bearer  {good}"}).is_success


def test_a_key_made_elsewhere_works_at_once_and_stops_when_revoked(service: Keyed) -> None:
    _, secret = service.store.keys.create("elsewhere", Scope.READ)
    assert service.ask("GET", "/jobs", secret).status_code == 200
    service.store.keys.revoke("elsewhere")
    deadline = time.monotonic() + 2
    while service.ask("GET", "/jobs", secret).status_code != 401:
        assert time.monotonic() < deadline + 3  # a loaded machine gets some more
        time.sleep(0.05)


def test_a_key_expires(service: Keyed) -> None:
    _, secret = service.store.keys.create("brief", Scope.READ, expires_in_s=0.6)
    assert service.ask("GET", "/jobs", secret).status_code == 200
    time.sleep(0.7)
    assert service.ask("GET", "/jobs", secret).status_code == 401


def test_keys_over_http(service: Keyed) -> None:
    body = {"name": "ci@host", "scope": "tune", "expires_in_s": 3600, "job_limit": 5}
    made = service.ask("POST", "/keys", Scope.ADMIN, json=body)
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    document = made.json()
    secret = document.pop("key")
    assert document["scope"] == "tune"
    assert document["job_limit"] == 5
    assert service.ask("GET", "/jobs", secret).status_code == 200
    listed = service.ask("GET", "/keys", Scope.ADMIN)
    assert secret not in listed.text
    entry = next(key for key in listed.json()["keys"] if key["name"] == "ci@host")
    assert {**entry, "last_used_at": None} == document
    again = service.ask("POST", "/keys", Scope.ADMIN, json=body)
    assert again.status_code == 409
    assert "ci@host" in again.json()["detail"]
    gone = service.ask("DELETE", entry["links"]["revoke"]["href"], Scope.ADMIN)
    assert gone.status_code == 200
    assert gone.json()["revoked_at"]
    assert service.ask("GET", "/jobs", secret).status_code == 401  # in this process, at once
    assert service.ask("DELETE", "/keys/ci@host", Scope.ADMIN).status_code == 404


def test_pages_of_keys_and_of_the_audit(service: Keyed) -> None:
    for number in range(5):
        service.ask("POST", "/keys", Scope.ADMIN, json={"name": f"page{number}"})
        service.ask("DELETE", f"/keys/page{number}", Scope.ADMIN)
    for start, name in (
        ("/keys?inactive=true&limit=2", "keys"),
        ("/audit?actor=admin&limit=3", "entries"),
    ):
        listed = pages(service.http, start, name, headers=bearer(service.keys[Scope.ADMIN]))
        ids = [row["id"] for page in listed for row in page]
        assert ids == sorted(set(ids), reverse=True)
        assert len(ids) >= 5
    entry = service.ask("GET", "/audit?limit=1", Scope.ADMIN).json()["entries"][0]
    assert (entry["actor"], entry["action"]) == ("admin", "key-revoked")
    assert entry["subject"] == "page4"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "local"}, "name"),
        ({"name": 7}, "name"),
        ({"name": "x", "scope": "root"}, "scope"),
        ({"name": "x", "expires_in_s": 0}, "expires_in_s"),
        ({"name": "x", "expires_in_s": 10**12}, "expires_in_s"),
        ({"name": "x", "expires_in_s": 1.5}, "expires_in_s"),
        ({"name": "x", "job_limit": 0}, "job_limit"),
        ({"name": "x", "job_limit": True}, "job_limit"),
        ({"name": "x", "scopes": ["read"]}, "scopes"),
    ],
)
def test_wrong_keys_name_the_field(service: Keyed, body: dict[str, Any], field: str) -> None:
    before = service.store.keys.list(inactive=True)
    reply = service.ask("POST", "/keys", Scope.ADMIN, json=body)
    assert reply.status_code == 422
    assert reply.json()["errors"][0]["field"] == field
    assert len(service.store.keys.list(inactive=True)) == len(before)


@pytest.mark.parametrize("query", ["action=eaten", "after=x", "limit=0", "limit=1001", "who=me"])
def test_wrong_audit_queries(service: Keyed, query: str) -> None:
    assert service.ask("GET", f"/audit?{query}", Scope.ADMIN).status_code == 422


def test_no_later_key_owns_what_a_revoked_one_requested(service: Keyed) -> None:
    named = {"name": "leaves", "scope": "tune"}
    first = service.ask("POST", "/keys", Scope.ADMIN, json=named).json()["key"]
    problem = {"m": 16, "n": 8, "k": 8}
    job = service.ask("POST", "/tune", first, json=problem).json()["id"]
    service.ask("DELETE", "/keys/leaves", Scope.ADMIN)
    again = service.ask("POST", "/keys", Scope.ADMIN, json=named)
    assert again.status_code == 409
    assert "choose another name" in again.json()["detail"]
    second = service.ask("POST", "/keys", Scope.ADMIN, json={**named, "name": "comes"}).json()
    assert service.ask("DELETE", f"/jobs/{job}", second["key"]).status_code == 403
    assert service.ask("POST", f"/jobs/{job}/retry", second["key"]).status_code == 403


def test_a_cancelled_job_is_in_the_audit(service: Keyed) -> None:
    problem = {"m": 8, "n": 8, "k": 8}
    job = service.ask("POST", "/tune", Scope.TUNE, json=problem).json()["id"]
    for _ in range(2):
        service.ask("DELETE", f"/jobs/{job}", Scope.TUNE)
    found = service.ask("GET", "/audit?action=job-cancelled", Scope.ADMIN).json()["entries"]
    assert [(entry["actor"], entry["subject"]) for entry in found] == [("tune", job)]


def test_use_is_noted_soon_and_then_once_a_minute(service: Keyed) -> None:
    _, secret = service.store.keys.create("used", Scope.READ)

    def noted() -> float | None:
        return next(k for k in service.store.keys.list() if k.name == "used").last_used_at

    service.ask("GET", "/jobs", secret)
    until(lambda: noted() is not None, "use was not noted")
    first = noted()
    service.ask("GET", "/jobs", secret)
    time.sleep(1.5)
    assert noted() == first


def test_no_key_is_ever_logged(service: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (service.keys[Scope.READ], "gsk_mistyped"):
            service.ask("GET", "/jobs", key)
            service.ask("POST", "/tune", key, json={"m": 1})
    assert "gsk_" not in caplog.text


FAULT = """
import structlog
from service import logging
logging.configure(json={json})
def serve(headers):
    raise RuntimeError("broken")
try:
    serve([(b"authorization", b"Bearer gsk_secret")])
except RuntimeError:
    structlog.get_logger("x").exception("fault")
"""


@pytest.mark.parametrize("json", [False, True])
def test_a_fault_in_the_log_shows_no_headers(json: bool) -> None:
    code = FAULT.format(json=json)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "RuntimeError: broken" in done.stderr
    assert "gsk_secret" not in done.stderr


def test_a_rebound_name_gets_nothing(client: httpx.Client) -> None:
    path = "/best?m=4096&n=4096&k=4096"
    assert client.get(path).status_code == 200
    reply = client.get(path, headers={"Host": "evil.example"})
    assert reply.status_code == 421
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://HOST"}, True),
        ({"Origin": "https://HOST"}, True),
        ({"Origin": "http://HOST.evil.example"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://HOST"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
    ],
)
def test_changes_come_from_here(service: Keyed, headers: dict[str, str], passes: bool) -> None:
    host = service.http.base_url.netloc.decode()
    sent = {name: value.replace("HOST", host) for name, value in headers.items()}
    sent |= bearer(service.keys[Scope.ADMIN])
    for method, path in (("POST", "/tune"), ("DELETE", "/keys/none"), ("PUT", "/jobs")):
        reply = service.http.request(method, path, headers=sent)
        assert (reply.status_code != 403) is passes
        if not passes:
            assert reply.json()["type"] == "urn:gemmsmith:problem:cross-site"
    assert service.http.get("/jobs", headers=sent).status_code == 200
