"""The program's commands, run in this process."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from service.cli.main import app
from service.settings import Settings


def invoke(*words: object, answer: str = "") -> Result:
    """Run `gemmsmith` with these words, to any exit status; `answer` is what is typed."""
    return CliRunner().invoke(app, [str(word) for word in words], input=answer)


def run(*words: object, code: int = 0, answer: str = "") -> Result:
    """As `invoke`, and check the exit status."""
    result = invoke(*words, answer=answer)
    assert result.exit_code == code, result.output
    return result


def use(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Let this test's commands run with the settings."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    return settings
