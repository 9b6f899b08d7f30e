"""What commands print of services and databases: one line where it is one, and no password."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from gemmsmith import Answer
from gemmsmith.core.launch import Launch
from tests.support.commands import invoke as run
from tests.support.replacing import replace
from tests.unit.client import conftest
from tests.unit.client.misbehaving import Misbehaving, Say, job, stream

EVIL = "\x1b]0;x\x07\x1b[2J\x9b2J\r\nerror: forged\u2028line \u202e http://me:secret@host"
CONTROL = {"\x1b", "\x07", "\x9b", "\r", "\u2028", "\u202e"}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GEMMSMITH_DATABASE", f"sqlite:///{tmp_path}/gemmsmith.db")
    monkeypatch.setenv("GEMMSMITH_WINNERS", str(tmp_path / "none"))
    monkeypatch.setenv("GEMMSMITH_TRUSTED", str(tmp_path / "trusted"))
    monkeypatch.setattr("gemmsmith.http.retry.RetryPolicy.delay", lambda *_: None)


server, answer = conftest.server, conftest.answer


def check(result: Result, words: object) -> None:
    output = result.stdout + result.stderr
    assert not CONTROL.intersection(output), words
    assert not any(line.startswith("error: forged") for line in output.splitlines()), words
    assert "secret" not in output, words
    assert result.exception is None or isinstance(result.exception, SystemExit), words


COMMANDS = (
    ("best", 256, 4096, 4096),
    ("tune", 256, 4096, 4096, "--no-wait"),
    ("tune", 256, 4096, 4096),
    ("jobs", "list"),
    ("jobs", "show", "j1"),
    ("jobs", "cancel", "j1"),
    ("jobs", "retry", "j1"),
    ("jobs", "watch", "j1"),
    ("winners", "history", 256, 4096, 4096),
    ("winners", "unpin", 256, 4096, 4096),
    ("results",),
    ("results", "--format", "csv"),
    ("doctor",),
    ("sync",),
    ("signing", "trust", "--yes"),
    ("compile", 256, 4096, 4096, "--limit", 1, "--from"),
)


def ask(url: str, words: tuple[object, ...], *more: str) -> Result:
    takes_address = words[0] in ("sync", "signing", "compile")
    return run(*words, *([url] if takes_address else ["--url", url]), *more)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(str, words)))
def test_errors_of_a_service_are_one_line(server: Misbehaving, words: tuple[object, ...]) -> None:
    document = {"title": EVIL, "detail": EVIL, "type": EVIL, "checks": {"x": EVIL}}
    for status in (301, 422, 500):
        headers = {"Location": "https://me:secret@gemmsmith.example/"}
        server.say(Say(status, json.dumps(document).encode(), headers))
        result = ask(server.url, words)
        check(result, words)
        if words[0] != "doctor":
            assert result.exit_code in (1, 2)
            assert result.stderr.splitlines()[-1].startswith("error: ")
            assert status != 301 or "https://***@gemmsmith.example" in result.stderr.replace(
                "me:***", "***"
            )


def evil(answer: Answer) -> Answer:
    """An answer in which every text that may be anything is."""
    assert answer.config is not None
    return replace(
        answer,
        device=replace(answer.device, name=EVIL, arch=EVIL),
        config=replace(answer.config, kernel=replace(answer.config.kernel, name=EVIL), pack=EVIL),
        promoted_at=EVIL,
        environment=replace(answer.environment, driver=EVIL),
    )


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["lines", "JSON"])
def test_answers_of_a_service_are_harmless(
    server: Misbehaving,
    answer: Answer,
    form: tuple[str, ...],
) -> None:
    fields = evil(answer).to_dict()
    status = json.loads(
        job("failed", error=EVIL, phase=EVIL, best=EVIL, best_us=1.0, waits=EVIL, device=EVIL,
            ordered_by=EVIL, created_at=EVIL, finished_at=EVIL).body
    )  # fmt: skip
    candidate = {"kernel": {"name": EVIL}, "launch": Launch().to_dict()}
    trial = {"problem": fields["problem"], "candidate": candidate, "phase": EVIL, "x": EVIL}
    odd = [{}, {"problem": 1}, trial | {"candidate": EVIL}, trial | {"statistics": EVIL}]
    revision = {"answer": fields, "origin": "measured", "current": True}
    events = stream((1, "failed", {"error": EVIL, "phase": EVIL})).body
    said: dict[tuple[object, ...], Any] = {
        ("best", 256, 4096, 4096): fields,
        ("jobs", "list"): {"jobs": [status]},
        ("jobs", "show", "j1"): status,
        ("jobs", "cancel", "j1"): status,
        ("jobs", "retry", "j1"): status,
        ("tune", 256, 4096, 4096, "--no-wait"): status,
        ("winners", "history", 256, 4096, 4096): {"revisions": [revision]},
        ("winners", "unpin", 256, 4096, 4096): revision,
        ("results",): {"trials": [trial, *odd]},
        ("sync",): {"winners": odd, "devices": [fields["device"], {}]},
        ("doctor",): {"checks": {"database": EVIL}, "detail": EVIL},
    }
    for words, document in said.items():
        server.say(Say(body=json.dumps(document).encode()))
        result = ask(server.url, words, *form)
        check(result, words)
        assert len(result.output) > 50, words
        if form and words[0] != "results":
            json.loads(result.stdout)
    server.say(
        Say(200, events, {"Content-Type": "text/event-stream"}),
        Say(body=json.dumps(status).encode()),
    )
    check(ask(server.url, ("jobs", "watch", "j1")), "watch")


def test_the_key_goes_to_its_own_service(
    server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMSMITH_API_KEY", "gsk_environment")
    server.say(Say(403, b'{"title": "No", "detail": "no"}'))
    commands = (
        ("sync",),
        ("compile", 256, 4096, 4096, "--limit", 1, "--from"),
        ("signing", "trust", "--yes"),
        ("jobs", "list"),
        ("doctor",),
    )
    for url in ("http://127.0.0.1:1", "https://gemmsmith.example"):
        monkeypatch.setenv("GEMMSMITH_URL", url)
        for words in commands:
            server.seen.clear()
            ask(server.url, words)
            assert server.seen, words
            assert all("authorization" not in seen.headers for seen in server.seen), words
    monkeypatch.setenv("GEMMSMITH_URL", server.url)
    for words in commands:
        server.seen.clear()
        ask(server.url, words)
        keys = {seen.headers.get("authorization") for seen in server.seen}
        alone = words[0] in ("signing", "doctor")
        assert keys == {None if alone else "Bearer gsk_environment"}, words
