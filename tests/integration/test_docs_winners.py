"""docs/winners.md: every command in it is run, in its order, on a problem with a history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmsmith import Client, Problem
from tests.support.docs import ROOT, Session, steps, strict_curl, tools
from tests.support.serving import new_settings, promote, running, winner

PAGE = ROOT / "docs" / "winners.md"
PROBLEM = Problem(m=256, n=4096, k=4096)


@pytest.mark.long
def test_every_command_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.state.usable_gpu", lambda: None)
    settings = new_settings(tmp_path)
    promote(settings, winner(PROBLEM, us=20.0), winner(PROBLEM, us=19.0))
    environment = {
        **settings.environment(),
        **tools(),
        **strict_curl(tmp_path),
        "GEMMSMITH_URL": "",
    }
    with running(settings) as http, Client(str(http.base_url), cache_dir=None) as client:
        session = Session(tmp_path, environment, {"http://127.0.0.1:8000": client.url})
        served = []
        for step in steps(PAGE):
            said = session.run(step)
            current = next(r.answer for r in client.history(PROBLEM) if r.current)
            served.append((current.revision, current.pinned))
            if step.text.startswith("curl"):
                json.loads(said)
    assert served == [
        (2, False),  # the re-check is only ordered: no worker is here
        (2, False),
        (2, False),  # what was measured here is not replaced
        (2, False),
        (1, True),
        (2, True),
        (2, False),
        (2, False),
        (1, True),
        (2, False),
    ]
