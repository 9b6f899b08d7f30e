"""docs/access.md: its commands are run in their order against a service that asks for keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemmsmith.core.problem import Problem
from tests.support.docs import ROOT, Session, Step, steps, strict_curl, tools
from tests.support.serving import new_settings, promote, running, winner

PAGE = ROOT / "docs" / "access.md"


@pytest.mark.long
def test_every_command_works_as_printed(tmp_path: Path) -> None:
    settings = new_settings(tmp_path, require_keys=True)
    promote(settings, winner(Problem(m=4096, n=6144, k=4096)))
    environment = {**settings.environment(), **tools(), **strict_curl(tmp_path)}
    first, serve, *rest = steps(PAGE)
    with running(settings) as http:
        session = Session(
            tmp_path, environment, {"http://HOST:8000": str(http.base_url).rstrip("/")}
        )
        key = session.run(first).strip()
        session.environment["GEMMSMITH_API_KEY"] = key
        session.environment["GEMMSMITH_URL"] = session.instead["http://HOST:8000"]
        assert serve.text.startswith("gemmsmith serve")  # it is running
        for step in rest:
            said = session.run(whole(step, key))
            if step.text.startswith("curl"):
                json.loads(said)
    assert [step.text.split()[0] for step in rest].count("curl") == 4


def whole(step: Step, key: str) -> Step:
    """A program with what the page leaves out: its imports, a key, and a question."""
    if step.language != "python":
        return step
    text = (
        f"from gemmsmith import Client\nkey = {key!r}\n{step.text}client.best(4096, 6144, 4096)\n"
    )
    return Step(where=step.where, language=step.language, text=text, shown=step.shown)
