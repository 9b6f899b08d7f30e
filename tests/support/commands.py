"""The program's commands, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from service.cli.main import app


def run(*words: object, code: int = 0, answer: str = "") -> Result:
    """Run `gemmsmith` with these words; `answer` is what is typed. Checks the exit status."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=answer)
    assert result.exit_code == code, result.output
    return result
