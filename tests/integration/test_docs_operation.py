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
from pathlib import Path

import httpx
import pytest

from service.settings import PREFIX, Settings
from tests.support.processes import until
from tuner.store import Store
from tuner.store.database import parse_url, sqlite_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
RUN = {"gemmsmith", "curl", "journalctl"}
NOT_RUN = {
    *("apt-get", "useradd", "install", "runuser"),  # root's
    *("python3", ".venv/bin/pip", "git", "cd", "podman"),  # the network's
}
SOURCES = [
    ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("service", "tuner", "client/gemmsmith")
    for path in (ROOT / folder).rglob("*.py")
]


class Machine:
    """What the docs call this machine, under one folder, with the settings file's settings."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        settings = self.placed((ROOT / "configs/deploy/gemmsmith.env").read_text(encoding="utf-8"))
        commands = folder / "bin"
        commands.mkdir()
        for name, runs in (
            ("gemmsmith", f'exec {sys.executable} -m service.cli "$@"'),
            ("journalctl", f"cat {self.log}"),
        ):
            (commands / name).write_text(f"#!/bin/sh\n{runs}\n")
            (commands / name).chmod(0o755)
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
            **dict(line.split("=", 1) for line in settings.splitlines() if line[0] != "#"),
            "GEMMSMITH_PORT": self.url.rpartition(":")[2],
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    @property
    def database(self) -> str:
        return self._environ["GEMMSMITH_DATABASE"]

    def placed(self, text: str) -> str:
        """With the folders and the address that these have here."""
        text = text.replace("/opt/gemmsmith", str(ROOT)).replace(
            "/var/lib/gemmsmith", str(self.state)
        )
        return text.replace("http://127.0.0.1:8000", self.url)

    def systemctl(self, verb: str, *units: str) -> None:
        if "gemmsmith" not in units:
            assert verb == "daemon-reload"
            return
        if verb in ("stop", "restart"):
            self.stop()
        if verb in ("start", "restart", "enable"):
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    ["gemmsmith", "serve"],
                    env=self._environ,
                    cwd=self.state,
                    stdout=log,
                    stderr=log,
                    executable=self._environ["PATH"].partition(":")[0] + "/gemmsmith",
                )
            until(self._answers, "the service does not answer")

    def run(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", self.placed(line)],
            env=self._environ,
            cwd=self.state,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

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
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    (machine.state / "backups").mkdir(parents=True)  # `install -d`, which is root's
    yield machine
    machine.stop()


def test_every_command_works_as_printed(machine: Machine) -> None:
    ran = 0
    for line in LINES:
        if line[0] == "{":
            sample = json.loads(line)
            continue
        words = shlex.split(line)
        if words[0] == "systemctl":
            machine.systemctl(*(word for word in words[1:] if word != "--now"))
        elif words[0] in RUN:
            machine.run(line)
            ran += 1
        elif line.startswith(PREFIX):
            assert sqlite_path(parse_url(words[0].partition("=")[2])) is None
        else:
            assert words[0] in NOT_RUN, line
    assert ran > 10
    backups = {path.name for path in (machine.state / "backups").iterdir()}
    assert backups == {"by-hand", "by-hand.packs.tar", "before-upgrade"}
    with Store.open(machine.database) as store:
        assert [key.name for key in store.keys.list(limit=9)] == ["ops"]  # restored, too
        assert store.counts()["winners"] > 200
    logged = [
        json.loads(line) for line in machine.log.read_text().splitlines() if line.startswith("{")
    ]
    requests = [line for line in logged if line["event"] == "request"]
    assert requests
    assert requests[0].keys() | {"key"} == sample.keys()


def test_every_setting_is_listed_with_its_default() -> None:
    rows = re.findall(rf"^\| `{PREFIX}(\w+)` \| (?:`(.*?)` )?\| .+\|$", PAGE, re.MULTILINE)
    defaults = {name: str(field.default) for name, field in Settings.model_fields.items()}
    listed = {name.lower(): default for name, default in rows if name.lower() in defaults}
    assert listed == defaults
    assert [name.lower() for name, _ in rows if name.lower() in defaults] == list(defaults)


def test_every_other_variable_is_listed() -> None:
    read = {
        node.value
        for tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(rf"{PREFIX}[A-Z_]+", node.value)
    }
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    listed = set(re.findall(rf"^\| `({PREFIX}\w+)`", PAGE, re.MULTILINE))
    assert listed - settings == read - settings - {"GEMMSMITH_SUPERVISED"}  # our own, for a child


def test_every_message_is_one_of_ours() -> None:
    ours = [text for tree in SOURCES for node in ast.walk(tree) if (text := said(node))]
    section = PAGE.partition("## When it complains")[2]
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
