"""The destination of requests: proxies, redirects, and which service gets which key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemmsmith import Client, ServiceFault, ServiceUnavailable
from gemmsmith.http.address import Address, is_loopback
from gemmsmith.http.replies import NoAnswer
from gemmsmith.http.sending import ask
from tests.unit.client.misbehaving import KINDS, Misbehaving, Say, misbehaving
from tests.unit.client.misbehaving import ask as ask_with

KEY = "gsk_" + "k" * 43
OF_THE_SERVICE = "gsk_environment"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def proxy() -> Iterator[Misbehaving]:
    with misbehaving() as server:
        server.say(Say(body=b'{"devices": []}'))
        yield server


def devices(kind: type, url: str, **options: Any) -> Any:
    return ask_with(kind, url, "devices", **options)


@KINDS
def test_this_machine_is_reached_directly(
    kind: type, server: Misbehaving, proxy: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say(Say(body=b'{"devices": []}'))
    port = server.url.rpartition(":")[2]
    for url in (
        proxy.url,
        proxy.url.removeprefix("http://"),
        "socks5://127.0.0.1:1",
        "rubbish://",
    ):
        for name in ("HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, url)
            for host in ("127.0.0.1", "LOCALHOST"):
                assert devices(kind, f"http://{host}:{port}") == []
            assert not isinstance(ask(server.url, "/healthz", timeout=5), NoAnswer)
            monkeypatch.delenv(name)
    assert proxy.seen == []


@KINDS
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_others_are_reached_through_the_proxy(
    kind: type, proxy: Misbehaving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in (proxy.url, proxy.url.removeprefix("http://")):
        monkeypatch.setenv(name, url)
        assert devices(kind, "http://gemmsmith.test:8000") == []
        assert proxy.seen.pop().headers["host"] == "gemmsmith.test:8000"
    for exempt in ("gemmsmith.test", ".test", "*", "other.test,gemmsmith.test:8000"):
        monkeypatch.setenv("NO_PROXY", exempt)
        with pytest.raises(ServiceUnavailable, match="no answer"):
            devices(kind, "http://gemmsmith.test:8000")
        assert proxy.seen == []


@KINDS
@pytest.mark.parametrize(
    "url",
    [
        "socks5://me:secret@127.0.0.1:1",
        "socks5h://me:secret@127.0.0.1:1",
        "socks4://me:secret@127.0.0.1:1",
        "http://me:secret@127.0.0.1:port",
        "ftp://me:secret@127.0.0.1",
    ],
)
def test_a_proxy_that_cannot_be_used_is_a_line(
    kind: type, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", url)
    with pytest.raises(
        ServiceUnavailable, match=r"the proxy .* cannot be used: .*NO_PROXY"
    ) as caught:
        devices(kind, "http://gemmsmith.test:8000")
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)
    assert ("httpx[socks]" in str(caught.value)) == url.startswith("socks5")


@KINDS
def test_a_redirect_names_its_place_and_is_not_followed(kind: type, server: Misbehaving) -> None:
    with misbehaving() as elsewhere:
        elsewhere.say(Say(body=b'{"devices": []}'))
        for status in (301, 302, 303, 307, 308):
            place = f"{elsewhere.url}/devices?x=1"
            server.say(Say(status, headers={"Location": place}))
            with pytest.raises(ServiceFault, match=f"redirects to {elsewhere.url}/devices: use"):
                devices(kind, server.url, api_key=KEY)
        assert elsewhere.seen == []


def test_a_redirect_is_named_by_every_call(server: Misbehaving, tmp_path: Path) -> None:
    server.say(Say(301, headers={"Location": "https://gemmsmith.example/"}))
    with Client(server.url, retries=0, cache_dir=None) as client:
        for call in (
            lambda: client.best(1, 8, 8),
            lambda: client.tune(1, 8, 8),
            lambda: client.snapshot(),
            lambda: list(client.results()),
            lambda: list(client.job_events("j1")),
            lambda: client.pack("0" * 64),
            lambda: client.signing_key(),
        ):
            with pytest.raises(ServiceFault, match=r"https://gemmsmith\.example"):
                call()


@KINDS
def test_the_environments_key_is_for_its_service(
    kind: type, server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.say(Say(body=b'{"devices": []}'))
    port = server.url.rpartition(":")[2]
    monkeypatch.setenv("GEMMSMITH_API_KEY", OF_THE_SERVICE)

    def sent(url: str, **options: Any) -> str | None:
        server.seen.clear()
        devices(kind, url, **options)
        return server.seen[0].headers.get("authorization")

    for service in ("", "http://127.0.0.1:1", f"http://localhost:{port}", "https://x", "rubbish"):
        monkeypatch.setenv("GEMMSMITH_URL", service)
        assert sent(server.url) is None
        assert sent(server.url, api_key=KEY) == f"Bearer {KEY}"
    for service in (
        server.url,
        f"{server.url}/",
        f" {server.url}",
        f"http://a:b@127.0.0.1:{port}/x",
    ):
        monkeypatch.setenv("GEMMSMITH_URL", service)
        assert sent(server.url) == f"Bearer {OF_THE_SERVICE}"
        assert sent(server.url, api_key=False) is None
    ask(server.url, "/", timeout=5)
    assert "authorization" not in server.seen[-1].headers


@KINDS
def test_a_password_of_the_url_goes_to_the_service_and_nowhere_else(
    kind: type, server: Misbehaving, tmp_path: Path
) -> None:
    server.say(Say(body=b'{"devices": []}'))
    url = server.url.replace("//", "//me:s%40cret@")
    devices(kind, url)
    assert server.seen[0].headers["authorization"] == "Basic bWU6c0BjcmV0"
    client = kind(url, cache_dir=tmp_path)
    assert client.url == server.url
    server.stop()
    with pytest.raises(ServiceUnavailable) as caught:
        devices(kind, url)
    assert "cret" not in str(caught.value) + repr(client) + repr(Address.parse(url))


MESSAGE = r"URL must be like http://127\.0\.0\.1:8000|a port must be in"


@KINDS
@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "localhost:8000",
        "ftp://localhost",
        "http://",
        "http://me:secret@",
        "http://me:secret@host:port",
        "http://me:secret@host:99999",
        "http://me:secret@host:0",
        "http://me:secret@host:-1",
        "http://me:se/cret@host",
        "http://host\n",
        "http://ho\x1b[2Jst",
        "http://xn--a.test",
        "http://host:8000/?me=1",
        "http://host:8000/#x",
        "http://" + "a" * 70_000,
    ],
)
def test_an_invalid_url_raises_a_message_of_one_line(kind: type, url: str) -> None:
    with pytest.raises(ValueError, match=MESSAGE) as caught:
        kind(url, cache_dir=None)
    assert str(caught.value).isprintable()
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("gemmsmith.localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("128.0.0.1", False),
        ("::2", False),
        ("localhost.test", False),
        ("notlocalhost", False),
    ],
)
def test_names_of_this_machine(host: str, here: bool) -> None:
    assert is_loopback(host) is here
