"""The step `invariance` of the GPU session, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_session
from benchmarks.session import invariance
from benchmarks.session.core import Session
from benchmarks.session.steps import STEPS

Commands = list[tuple[str, dict[str, str]]]


@pytest.fixture
def failing() -> list[str]:
    """Words; commands with one of them fail."""
    return []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: list[str]) -> Commands:
    """Commands that ran, with their environments; those with `-o` write a file."""
    ran: Commands = []

    def command(_: Session, *words: str, env: Any = None, **__: object) -> int:
        line = " ".join(words[2:])
        ran.append((line, dict(env or {})))
        if any(name in line for name in failing):
            return 1
        if "-o" in words:
            Path(words[words.index("-o") + 1]).write_text(line)
        return 0

    monkeypatch.setattr(Session, "command", command)
    monkeypatch.setattr(invariance, "STATE", tmp_path / "state")
    monkeypatch.setattr(invariance, "CARRIED", tmp_path / "carried")
    return ran


def session(tmp_path: Path, *words: str) -> Session:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    return gpu_session.parse(["invariance", "--out", str(out), "--dtype", "bf16", *words])[1]


def names(commands: Commands) -> list[str]:
    """The modules of the parts that ran."""
    return [
        line.split()[0].rpartition(".")[2]
        for line, _ in commands
        if line.startswith("benchmarks.invariance.") and " -o " in line
    ]


def test_a_second_call_goes_on_where_the_first_one_stopped(
    tmp_path: Path, commands: Commands, failing: list[str]
) -> None:
    failing.append("steps")
    assert STEPS["invariance"](session(tmp_path)) == 1
    parts = ["comparisons", "logits", "logits", "steps", "cost", "cost"]
    assert sorted(names(commands)) == sorted(parts)
    failing.clear()
    commands.clear()
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    assert STEPS["invariance"](session(tmp_path)) == 0
    assert names(commands) == ["steps"]
    written = {path.name for path in (tmp_path / "out").glob("invariance-*.json")}
    assert len(written) == 6
    tune = next(line for line, _ in commands if " tune " in f" {line} ")
    assert "--again" not in tune
    assert "--compiled-only" in tune


def test_winners_that_are_carried_are_imported_and_nothing_begins_too_late(
    tmp_path: Path, commands: Commands
) -> None:
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "winners-bf16.sum_sequential.jsonl").touch()
    (tmp_path / "carried" / "winners-bf16.jsonl").touch()
    assert STEPS["invariance"](session(tmp_path, "--time-limit", "0")) == 1
    assert names(commands) == []
    carried = [line for line, _ in commands if str(tmp_path / "carried") in line]
    assert len(carried) == 1
    assert carried[0].endswith("winners-bf16.sum_sequential.jsonl")


def test_each_part_has_the_winners_and_the_environment_that_it_needs(
    tmp_path: Path, commands: Commands
) -> None:
    assert STEPS["invariance"](session(tmp_path, "--device", "cuda:1")) == 0
    costs = [env for line, env in commands if "invariance.cost" in line]
    assert [env.get("CUBLAS_WORKSPACE_CONFIG") for env in costs] == [None, ":0:0"]
    assert all(env["CUDA_VISIBLE_DEVICES"] == "1" for _, env in commands)
    databases = {env["GEMMSMITH_DATABASE"].rpartition("/")[2] for _, env in commands}
    assert databases == {"gemmsmith.db", "plain.db"}
    assert sum("--without-triton" in line for line, _ in commands) == 1


def test_fp8_is_only_compared(tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ["invariance", "--out", str(out), "--dtype", "fp8_e4m3"]
    assert STEPS["invariance"](gpu_session.parse(words)[1]) == 0
    assert names(commands) == ["comparisons"]
    assert any("--dtype fp8_e4m3.scale_row.sum_sequential" in line for line, _ in commands)
