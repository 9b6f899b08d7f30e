"""A wrong URL is named as such, whatever is wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.serving import new_settings, running
from tests.unit.client.misbehaving import Say, misbehaving


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("gemmsmith.http.retry.RetryPolicy.delay", lambda *_: None)


@pytest.fixture
def stranger() -> Iterator[str]:
    """The URL of a web server that knows nothing of us."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def error(*words: str, code: int) -> str:
    result = run(*words, code=code)
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    "words", [("best", "1", "2", "3"), ("tune", "1", "2", "3"), ("jobs", "list"), ("results",)]
)
def test_another_web_server_is_no_service(stranger: str, words: tuple[str, ...]) -> None:
    said = error(*words, "--url", stranger, code=2)
    assert said.startswith(f"error: the URL {stranger} is wrong: what answers there is no gemmsmi")


def test_a_redirect_is_named() -> None:
    with misbehaving() as server:
        server.say(Say(301, headers={"Location": "https://gemmsmith.example/best"}))
        said = error("best", "1", "2", "3", "--url", server.url, code=2)
    assert said == (
        f"error: the URL {server.url} is wrong: the service's URL redirects to "
        "https://gemmsmith.example/best: use that server's URL\n"
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "127.0.0.1:8000"])
@pytest.mark.parametrize(
    "words",
    [
        ("best", "1", "2", "3", "--url"),
        ("jobs", "list", "--url"),
        ("sync",),
        ("compile", "256", "256", "256", "--from"),
    ],
)
def test_what_is_no_url_is_a_line(url: str, words: tuple[str, ...]) -> None:
    assert url in error(*words, url, code=2)


def test_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@127.0.0.1:1")
    said = error("best", "1", "2", "3", "--url", "http://gemmsmith.test", code=1)
    assert "the proxy socks5://127.0.0.1:1 cannot be used" in said


def test_a_host_that_does_not_exist() -> None:
    said = error("best", "1", "2", "3", "--url", "http://nowhere.invalid", code=2)
    assert said == "error: the URL http://nowhere.invalid is wrong: there is no such host\n"


@pytest.mark.parametrize("words", [("jobs", "list"), ("best", "16", "16", "16")])
def test_a_port_where_nobody_listens(words: tuple[str, ...]) -> None:
    said = error(*words, "--url", "http://127.0.0.1:9", code=1)
    assert "at http://127.0.0.1:9: start a service there with `gemmsmith serve`, or" in said
    assert "--url, GEMMSMITH_URL" in said


def test_a_path_too_much_names_the_service(tmp_path: Path) -> None:
    with running(new_settings(tmp_path)) as http:
        root = str(http.base_url).rstrip("/")
        said = error("jobs", "list", "--url", f"{root}/api", code=2)
        assert said == f"error: the URL {root}/api is wrong: the service is at {root}\n"
        said = error("jobs", "list", "--url", root.replace("http:", "https:"), code=2)
        assert said.endswith(f"is wrong: what answers there speaks no TLS; try {root}\n")
