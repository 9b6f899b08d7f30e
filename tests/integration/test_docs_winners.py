"""docs/winners.md: every command in it is run, in its order, on a problem with a history."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gemmsmith import Client, Problem
from tests.support.serving import new_settings, promote, running, winner

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "winners.md").read_text(encoding="utf-8")
PROBLEM = Problem(m=256, n=4096, k=4096)


def test_every_command_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.app.usable_gpu", lambda: None)
    settings = new_settings(tmp_path)
    promote(settings, winner(PROBLEM, us=20.0), winner(PROBLEM, us=19.0))
    environment = {**os.environ, **settings.environment()}
    environment.pop("GEMMSMITH_URL", None)
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    lines = [
        line for block in blocks for line in block.splitlines() if re.match("curl|gemmsmith", line)
    ]
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        served = []
        for line in lines:
            words = shlex.split(line.replace("http://127.0.0.1:8000", client.url))
            if words[0] == "gemmsmith":
                words[:1] = [sys.executable, "-m", "service.cli"]
            else:
                words[1:1] = ["--silent", "--show-error", "--fail-with-body"]
            done = subprocess.run(
                words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            current = next(r.answer for r in client.history(PROBLEM) if r.current)
            served.append((current.revision, current.pinned))
            if words[0] == "curl":
                json.loads(done.stdout)
    assert served == [
        (2, False),  # the re-check is only ordered: no worker is here
        (2, False),
        (1, True),
        (2, True),
        (2, False),
        (2, False),
        (1, True),
        (2, False),
    ]
