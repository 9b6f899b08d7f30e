"""A new database has the shipped winners, whichever command makes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import new_database, run
from tuner.store import Store, upgrade

WINNERS = Path(__file__).resolve().parents[3] / "configs" / "winners"
FILES = ("nvidia-h200-132sm.tf32.jsonl", "nvidia-h200-132sm.bf16.jsonl")
LATER = "nvidia-h200-132sm.int8.jsonl"


def winners_in(name: str) -> int:
    """A shipped file's first line is its header."""
    return len((WINNERS / name).read_text().splitlines()) - 1


COUNT = sum(winners_in(name) for name in FILES)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database that is not there yet; winners of two small files are shipped."""
    return new_database(tmp_path, monkeypatch, FILES)


def test_best_answers_with_them_and_says_that_it_made_the_database(url: str) -> None:
    first = run("best", 4096, 6144, 1024, "--json")
    assert json.loads(first.stdout)["match"] == "exact"
    assert first.stderr == f"created the database with {COUNT} shipped winners\n"
    assert run("best", 4096, 6144, 1024, "--json").stderr == ""


def test_best_loads_them_into_a_database_that_has_none(url: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    upgrade(url)
    first = run("best", 4096, 6144, 1024, "--json")
    assert json.loads(first.stdout)["match"] == "exact"
    assert first.stderr == f"loaded {COUNT} shipped winners into a database that had none\n"


def test_best_makes_no_database_that_was_named_by_mistake(url: str, tmp_path: Path) -> None:
    named = f"sqlite:///{tmp_path}/mistake.db"
    assert "no database" in run("best", 16, 16, 16, "--database", named, code=1).stderr
    assert not (tmp_path / "mistake.db").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("db", "upgrade"),
        ("keys", "create", "me", "--scope", "tune"),
        ("tune", 256, 4096, 4096, "--effort", "quick"),
    ],
)
def test_every_command_that_makes_a_database_loads_them(url: str, command: tuple[str, ...]) -> None:
    run(*command)
    with Store.open(url) as store:
        measured = [one for one in store.winners() if not one.replayed]
    assert len(measured) == COUNT > 80


def test_an_upgrade_loads_those_that_came_since(url: str, tmp_path: Path) -> None:
    run("db", "upgrade")
    (tmp_path / "shipped" / "more.jsonl").write_bytes((WINNERS / LATER).read_bytes())
    assert f"{winners_in(LATER)} shipped winners loaded" in run("db", "upgrade").stderr
