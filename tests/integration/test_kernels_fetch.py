"""Files of kernels from a URL: fetched if packs are missing, and without a key."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from gemmsmith.errors import GemmsmithError, ServiceUnavailable
from gemmsmith.http.download import download
from service import kernels as service_kernels
from tests.support.commands import run
from tests.support.kernels_files import build, files, install, site
from tests.support.machines import Machine


def test_a_file_from_a_url_is_fetched_if_packs_are_missing(
    here: Machine, there: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [there.publish(number % 8) for number in range(100)]
    content = build(there, *held).read_bytes()
    with site(content, "slow") as web:
        monkeypatch.setenv("GEMMSMITH_URL", web.url.partition("/made")[0])
        monkeypatch.setenv("GEMMSMITH_API_KEY", "secret")
        assert install(here, web.url).added == len(held)
        assert web.sent == len(content)
        assert install(here, web.url).added == 0
        assert web.sent < 1.5 * len(content)  # the list, and what arrived meanwhile
        for asked in web.asked:
            assert asked["path"] == "/made.gskernels?version=1"
            assert "secret" not in str(asked)
    assert not [name for name in here.files() if name.startswith((".", "tmp"))]


def test_a_redirect_is_named_and_not_followed(here: Machine, file: Path) -> None:
    with site(file.read_bytes()) as other, site(b"", f"{other.url}&token=x") as web:
        said = run("kernels", "install", web.url, code=1).stderr
        assert f"redirects to {other.url.partition('?')[0]}" in said
        assert "token" not in said
        assert "curl -L" in said
        assert other.asked == []
    assert files(here) == set()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("missing", "404 Not Found"),
        ("gzip", "cannot be fetched"),
        ("cut", "cannot be fetched"),
        ("stalled", "cannot be fetched"),
    ],
)
def test_what_a_server_does_not_give_is_one_line(
    here: Machine, file: Path, answer: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_kernels, "download", lambda url: download(url, timeout=0.5))
    with site(file.read_bytes(), answer) as web, pytest.raises(GemmsmithError, match=message):
        install(here, web.url)
    assert files(here) == set()


def test_a_server_that_drips_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmsmith.http.download.PACE", 2**40)

    def all_of(url: str) -> None:
        for _ in download(url, timeout=0.3):
            threading.Event().wait(0.2)

    with site(bytes(2**20)) as web, pytest.raises(ServiceUnavailable, match="in time"):
        all_of(web.url)


@pytest.mark.parametrize(
    "url", ["http://", "http://127.0.0.1:0/x", "https://[::1/x", "http://\x01"]
)
def test_what_is_no_url_is_misuse(here: Machine, url: str) -> None:
    said = run("kernels", "install", url, code=2).stderr
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_nothing_answers(here: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/x"
        said = run("kernels", "install", url, code=1).stderr
    assert "cannot be fetched" in said
    assert "secret" not in said
