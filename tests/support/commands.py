"""The program's commands, run in this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.cli.main import app
from service.settings import Settings
from tests.support import unchanged
from tests.support.serving import new_settings
from tests.support.shipped import DEVICE, ROOT, SWEEPS


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


def beside_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Settings:
    """Settings with nothing of this machine's own, in a folder with `program.py`."""
    for name in ("", "_URL", "_DEVICE", "_SWEEPS"):
        monkeypatch.delenv(f"GEMMSMITH{name}", raising=False)
    made = new_settings(tmp_path)
    monkeypatch.setenv("GEMMSMITH_DATABASE", made.database)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", unchanged.environment(tmp_path / "site")["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(program)
    return made


def new_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Iterable[str]) -> str:
    """The URL of a database that is not there yet, with these files of winners in `shipped`."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for name in files:
        (shipped / name).write_bytes((ROOT / "configs" / "winners" / name).read_bytes())
    url = f"sqlite:///{tmp_path}/data/new.db"
    for name, value in {
        "DATABASE": url,
        "WINNERS": str(shipped),
        "SWEEPS": str(SWEEPS),
        "PACKS": str(tmp_path / "packs"),
        "DEVICE": DEVICE,
    }.items():
        monkeypatch.setenv(f"GEMMSMITH_{name}", value)
    return url
