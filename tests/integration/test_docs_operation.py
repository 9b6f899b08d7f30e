"""docs/operation.md: its commands are run in their order, its tables hold what there is.

What needs root, a builder, or a package registry is not run: `tests/unit/test_deploy.py` holds it
against the files. `systemctl` starts and stops the service as the unit does.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest

from service.settings import PREFIX, Settings
from tests.support import docs
from tests.support.docs import ROOT
from tests.support.processes import until
from tuner import places
from tuner.store import Store
from tuner.store.database import parse_url, sqlite_path

PATH = ROOT / "docs" / "operation.md"
PAGE = PATH.read_text(encoding="utf-8")
UNRUN = {
    *("apt-get", "useradd", "install", "runuser"),  # root's
    *("python3", ".venv/bin/pip", "git", "cd", "podman"),  # the network's
}


@cache
def sources() -> list[ast.Module]:
    return [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("service", "tuner", "client/gemmsmith")
        for path in (ROOT / folder).rglob("*.py")
    ]


class Machine:
    """What the docs call this machine, under one folder, with the settings file's settings."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        (self.state / "backups").mkdir(parents=True)  # `install -d`, which is root's
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        commands = folder / "bin"
        commands.mkdir()
        for name, runs in (
            ("gemmsmith", f'exec {sys.executable} -m service.cli "$@"'),
            ("journalctl", f"cat {self.log}"),
        ):
            (commands / name).write_text(f"#!/bin/sh\n{runs}\n")
            (commands / name).chmod(0o755)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        here = {
            "/opt/gemmsmith": str(ROOT),
            "/var/lib/gemmsmith": str(self.state),
            "http://127.0.0.1:8000": self.url,
        }
        environ = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.session = docs.Session(self.state, environ, here)
        file = (ROOT / "configs/deploy/gemmsmith.env").read_text(encoding="utf-8")
        settings = [line.split("=", 1) for line in file.splitlines() if line[0] != "#"]
        self.session.environment |= {name: self.session.put(value) for name, value in settings}
        self.session.environment["GEMMSMITH_PORT"] = str(port)

    def systemctl(self, verb: str, *units: str) -> None:
        """What systemd does with gemmsmith.service."""
        if verb == "daemon-reload":
            return
        assert "gemmsmith" in units
        if verb in ("stop", "restart"):
            self.stop()
        if verb in ("start", "restart", "enable"):
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "service.cli", "serve"],
                    env=self.session.environment,
                    cwd=self.state,
                    stdout=log,
                    stderr=log,
                )
            until(self._answers, "the service does not answer")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            assert self._process.wait(60) == 0
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/healthz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    machine = Machine(tmp_path)
    yield machine
    machine.stop()


@pytest.mark.long
def test_every_command_works_and_prints_what_is_shown(machine: Machine) -> None:
    for step in docs.steps(PATH):
        words = shlex.split(step.text)
        if words[0] == "systemctl":
            machine.systemctl(*(word for word in words[1:] if word != "--now"))
        else:
            machine.session.run(step)
    backups = {path.name for path in (machine.state / "backups").iterdir()}
    assert backups == {"by-hand", "by-hand.packs.tar", "before-upgrade"}
    with Store.open(machine.session.environment["GEMMSMITH_DATABASE"]) as store:
        assert [key.name for key in store.keys.list(limit=9)] == ["ops"]  # restored, too
        assert store.counts()["winners"] > 200
    logged = [
        json.loads(line) for line in machine.log.read_text().splitlines() if line.startswith("{")
    ]
    requests = [line for line in logged if line["event"] == "request"]
    assert requests
    assert requests[0].keys() | {"key"} == sample().keys()


def sample() -> dict[str, object]:
    """The line of a log that the page shows."""
    (line,) = re.findall(r'^{"method".*}$', PAGE, re.MULTILINE)
    shown: dict[str, object] = json.loads(line)
    return shown


def test_what_is_not_run_is_roots_or_the_networks() -> None:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fences if not language]
    lines = [line for block in blocks for line in block.splitlines() if line[0] != "{"]
    (setting,) = [line for line in lines if line.startswith(PREFIX)]
    assert sqlite_path(parse_url(shlex.split(setting)[0].partition("=")[2])) is None
    assert {line.split()[0] for line in lines if line != setting} == UNRUN


def test_every_setting_is_listed_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GEMMSMITH_TRUSTED", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(places, "CHECKOUT", None)
    rows = re.findall(rf"^\| `{PREFIX}(\w+)` \| (?:`(.*?)` )?\| .+\|$", PAGE, re.MULTILINE)
    shipped = str(places.shipped("configs"))
    defaults = {
        name: str(field.get_default(call_default_factory=True))
        .replace(shipped, "configs")
        .replace(str(Path.home()), "~")
        for name, field in Settings.model_fields.items()
    }
    listed = {name.lower(): default for name, default in rows if name.lower() in defaults}
    assert listed == defaults
    assert [name.lower() for name, _ in rows if name.lower() in defaults] == list(defaults)


def test_every_other_variable_is_listed() -> None:
    read = {
        node.value
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(rf"{PREFIX}[A-Z_]+", node.value)
    }
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    listed = set(re.findall(rf"^\| `({PREFIX}\w+)`", PAGE, re.MULTILINE))
    children = {"GEMMSMITH_SAID", "GEMMSMITH_SUPERVISED"}  # what our own processes are told
    assert listed - settings == read - settings - children


def test_every_message_is_one_of_ours() -> None:
    ours = [text for tree in sources() for node in ast.walk(tree) if (text := said(node))]
    section = PAGE.partition("## Error messages")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        parts = [part.strip() for part in message.split("…") if part.strip()]
        assert any(all(part in text for part in parts) for text in ours), message


def said(node: ast.AST) -> str:
    """The text of a literal, what is filled in left out."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(said(value) for value in node.values) if isinstance(node, ast.JoinedStr) else ""
