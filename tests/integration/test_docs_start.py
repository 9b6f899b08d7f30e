"""docs/start.md, word by word, as somebody does it who has just heard of the project.

The repository is cloned and `make run` sets up its `.venv` with pip as always, from this tree's
files. Only what pip would download is there already: this interpreter's own packages lie on the
path of the new environment, which saves a minute and the network. The port is a free one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support import tree
from tests.support.docs import ROOT, Session, Step, assert_like, steps
from tests.support.processes import address

PAGE = ROOT / "docs" / "start.md"
SHOWN_URL = "http://127.0.0.1:8000"
SERVES = re.compile(r"make run|\.venv/bin/gemmsmith serve")


def cloned_from(folder: Path) -> Path:
    """A repository of this tree's files as they are now."""
    tree.copy(folder)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    return folder


def prepared(clone: Path) -> None:
    """An environment for `make run` to install into, with all that it would download."""
    venv.create(clone / ".venv", symlinks=True, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(clone / ".venv")})
    Path(packages, "downloaded.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = clone / ".venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{clone}/.venv/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)


class Server:
    """What the page has running in its first terminal."""

    def __init__(self, session: Session, step: Step) -> None:
        self._log = (session.folder / "server.log").open("w")
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {session.put(step.text)}"],
            cwd=session.folder,
            env=session.environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # a terminal sends Ctrl-C to all of it
        )

    def ready(self, session: Session, step: Step) -> None:
        """Wait until it answers, and take its address for the one on the page."""
        assert self.process.stdout is not None
        banner = ""
        while "/events" not in banner:
            line = self.process.stdout.readline()
            assert line, Path(self._log.name).read_text()
            banner += line
        session.instead[SHOWN_URL] = address(banner)
        assert_like(step.shown, session.show(banner), step.where)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


@pytest.mark.long
def test_the_new_users_path_word_by_word(tmp_path: Path) -> None:
    repository = cloned_from(tmp_path / "repository")
    elsewhere = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "GEMMSMITH_PORT": "0"}
    session = Session(tmp_path, elsewhere, {"REPOSITORY": str(repository)})
    for name in (
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "GEMMSMITH_URL",
        "GEMMSMITH_API_KEY",
        "GEMMSMITH_WINNERS",
    ):
        session.environment.pop(name, None)
    session.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    servers: list[Server] = []
    done = []
    try:
        for step in steps(PAGE):
            if step.language == "python":
                (session.folder / "ask.py").write_text(session.put(step.text))
            elif SERVES.match(step.text):
                for server in servers:
                    server.stop()
                servers.append(Server(session, step))
                servers[-1].ready(session, step)
            else:
                session.run(step)
            done.append(step.text.split()[0])
            if step.text.startswith("cd "):
                prepared(session.folder)
    finally:
        for server in servers:
            server.stop()
    assert len(servers) == 2
    assert done.count("curl") == 5
    assert done[-1] == ".venv/bin/python"
