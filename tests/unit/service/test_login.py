"""Browsers: the login form, its cookie, and where it leads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import pytest

from service.settings import Settings
from tests.support.serving import new_settings, running
from tuner.store import Store
from tuner.store.keys import Scope

HTML = {"Accept": "text/html,application/xhtml+xml"}


@dataclass(frozen=True, kw_only=True)
class Site:
    settings: Settings
    url: str
    key: str

    def browser(self) -> httpx.Client:
        """With a cookie jar of its own."""
        return httpx.Client(base_url=self.url, headers=HTML, timeout=20)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    settings = new_settings(
        tmp_path_factory.mktemp("site"), require_keys=True, trusted_proxies="127.0.0.1"
    )
    with Store.open(settings.database) as store:
        _, key = store.keys.create("reader", Scope.READ)
    with running(settings) as client:
        yield Site(settings=settings, url=str(client.base_url), key=key)


def test_a_browser_is_led_to_the_form_and_back(site: Site) -> None:
    with site.browser() as browser:
        first = browser.get("/docs?a=1&b=2")
        assert first.status_code == 303
        assert first.headers["location"] == "/ui/login?next=" + quote("/docs?a=1&b=2", safe="/")
        form = browser.get(first.headers["location"])
        assert form.status_code == 200
        assert 'name="key"' in form.text
        assert 'value="/docs?a=1&amp;b=2"' in form.text
        done = browser.post("/ui/login", data={"key": f" {site.key} ", "next": "/docs?a=1&b=2"})
        assert (done.status_code, done.headers["location"]) == (303, "/docs?a=1&b=2")
        cookie = done.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Secure" not in cookie  # it came by http
        assert browser.get(done.headers["location"]).status_code == 200
        out = browser.post("/ui/logout")
        assert out.headers["location"] == "/ui/login"
        assert browser.get("/docs").status_code == 303


def test_who_reads_no_pages_is_not_led_anywhere(site: Site) -> None:
    with site.browser() as browser:
        assert browser.get("/docs", headers={"Accept": "application/json"}).status_code == 401
        assert browser.post("/tune", json={"m": 1, "n": 1, "k": 1}).status_code == 401


def test_the_cookie_has_no_more_rights_than_the_key(site: Site) -> None:
    with site.browser() as browser:
        browser.post("/ui/login", data={"key": site.key})
        assert browser.get("/jobs").status_code == 200
        assert browser.post("/tune", json={"m": 1, "n": 1, "k": 1}).status_code == 403
        foreign = browser.post("/ui/logout", headers={"Origin": "http://evil.example"})
        assert foreign.status_code == 403


def test_a_revoked_key_ends_the_session(site: Site) -> None:
    with Store.open(site.settings.database) as store, site.browser() as browser:
        _, key = store.keys.create("brief", Scope.READ, expires_in_s=3600)
        assert browser.post("/ui/login", data={"key": key}).status_code == 303
        store.keys.revoke("brief")
        # Any unknown key makes the service look again at once.
        assert httpx.get(f"{site.url}/jobs", headers={"Authorization": "Bearer x"}).is_error
        assert browser.get("/docs").status_code == 303


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 401),
        (b"key=", 401),
        (b"key=gsk_wrong", 401),
        (b"x" * 999, 401),
        (b"key=%ff%fe", 422),
        (b"\xff", 422),
    ],
)
def test_a_wrong_key_is_said_on_the_form(site: Site, body: bytes, status: int) -> None:
    with site.browser() as browser:
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        reply = browser.post("/ui/login", content=body, headers=kind)
        assert reply.status_code == status
        assert ('role="alert"' in reply.text) == (status == 401)
        assert "set-cookie" not in reply.headers
        assert "gsk_wrong" not in reply.text


@pytest.mark.parametrize(
    "elsewhere",
    [
        "https://evil.example/",
        "//evil.example/",
        "/\\evil.example/",
        "/\t/evil.example",
        "/\n/evil.example",
        "javascript:alert(1)",
        "evil.example",
        "",
    ],
)
def test_a_login_never_leads_to_another_host(site: Site, elsewhere: str) -> None:
    with site.browser() as browser:
        done = browser.post("/ui/login", data={"key": site.key, "next": elsewhere})
        assert (done.status_code, done.headers["location"]) == (303, "/")
        form = browser.get("/ui/login", params={"next": elsewhere})
        assert 'name="next" value="/"' in form.text


def test_by_https_the_cookie_is_secure(site: Site) -> None:
    with site.browser() as browser:  # a proxy on this machine speaks https and says so
        done = browser.post(
            "/ui/login", data={"key": site.key}, headers={"X-Forwarded-Proto": "https"}
        )
        assert "Secure" in done.headers["set-cookie"]


def test_without_keys_there_is_nothing_to_log_in_to(client: httpx.Client) -> None:
    reply = client.get("/ui/login", params={"next": "/docs"})
    assert (reply.status_code, reply.headers["location"]) == (303, "/docs")
