"""Trusting a key that a service sends, or a key in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gemmsmith.__main__ import main
from gemmsmith.signing import PublicKey, Signer, Trusted
from tests.unit.client.misbehaving import Misbehaving, Say


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(tmp_path / "trusted"))
    monkeypatch.setattr("gemmsmith.http.retry.RetryPolicy.delay", lambda *_: None)
    return tmp_path / "trusted"


@pytest.fixture
def key(tmp_path: Path) -> PublicKey:
    return Signer.create(tmp_path / "signing.key", "\x1b[31mred").public


@pytest.fixture
def url(server: Misbehaving, key: PublicKey) -> str:
    server.say(Say(body=json.dumps({"id": "anything", "key": key.line}).encode()))
    return server.url


@pytest.mark.parametrize("answer", ["y\n", "", "no\n"])
def test_it_asks_before_it_believes_a_service(
    url: str,
    key: PublicKey,
    folder: Path,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    status = main(["trust", url])
    said = capsys.readouterr()
    assert f"{url} signs with the key {key.id}" in said.err
    assert "\x1b" not in said.err + said.out
    if answer != "y\n":
        assert (status, folder.exists()) == (1, False)
        return
    path = folder / f"127.0.0.1-{key.id}.pub"
    assert (status, said.out) == (0, f"{path}\n")
    assert Trusted.load(folder).keys.keys() == {key.id}
    assert "red" not in path.read_text()  # the untrusted comment of the key


def test_the_identifier_answers_the_question(url: str, key: PublicKey, folder: Path) -> None:
    assert main(["trust", url, "--id", "0" * 16]) == 1
    assert not folder.exists()
    assert main(["trust", url, "--id", key.id]) == 0
    assert Trusted.load(folder).keys.keys() == {key.id}


def test_a_key_in_a_file(key: PublicKey, folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "build host.pub"
    given.write_text(key.line)
    for _ in range(2):
        assert main(["trust", str(given), "--yes"]) == 0
    assert [path.name for path in folder.iterdir()] == [f"build-host-{key.id}.pub"]
    assert main(["trust", str(folder / f"build-host-{key.id}.pub"), "--yes"]) == 0
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (Say(404, b'{"title": "Not found", "detail": ""}'), "of a release that signs nothing"),
        (Say(body=b'{"key": "ssh-rsa AAAA"}'), "not a public key"),
        (Say(401, b'{"title": "Unauthorized", "detail": ""}'), "401 Unauthorized"),
    ],
    ids=["older", "no key", "refused"],
)
def test_a_service_without_a_key_to_show(
    server: Misbehaving, say: Say, reason: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.say(say)
    assert main(["trust", server.url, "--yes"]) == 1
    assert reason in capsys.readouterr().err
    assert not folder.exists()


def test_an_invalid_key_is_a_message_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.pub").write_text("odd")
    for source, reason in (
        (str(tmp_path / "none.pub"), "No such file"),
        (str(tmp_path / "odd.pub"), "not a public key"),
        ("http://", "the service's URL must be like"),
    ):
        assert main(["trust", source, "--yes"]) == 1
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        assert reason in line
