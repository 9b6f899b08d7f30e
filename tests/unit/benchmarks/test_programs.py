"""Programs that know nothing of gemmsmith, as a GPU session measures them: without a GPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.programs import hugging
from benchmarks.session import programs
from benchmarks.session.steps import STEPS


@pytest.mark.parametrize(("kernels", "limit"), [(653, 60), (0, 140)])
def test_programs_run_as_a_user_starts_them(
    kernels: int,
    limit: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled, a program is tuned only where that was not done before."""
    monkeypatch.setattr(programs, "count_kernels", lambda _env: kernels)
    names = ("--model", "example", "--model", "llama")
    session = gpu_session.parse(
        ["programs", "--dry-run", "--out", str(tmp_path), *names, "--mode", "eager"]
    )[1]
    assert STEPS["programs"](session) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    said = [re.sub(r"^\$ \S+ (-m service.cli.main )?|(?<= -- )\S+ ", "", line) for line in lines]
    tuned = f"run --tune --rehearse --effort default --time-limit {limit} -- "
    llama = "benchmarks/programs/hugging.py llama --steps 18"
    exports = [line for line in said if line.startswith("export ")]
    assert [line for line in said if line not in exports] == [
        f"{tuned}examples/train.py",
        "run -- examples/train.py",
        f"{tuned}{llama}",
        f"run -- {llama}",
        *[llama] * 3,
        *[f"{llama} --parts"] * 2,
    ]
    assert len(exports) == 2


def test_with_a_bundle_nothing_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--model", "llama", "--mode", "eager", "--bundle", "w.gspack", "--rounds", "1")
    session = gpu_session.parse(["programs", "--dry-run", "--out", str(tmp_path), *names])[1]
    assert STEPS["programs"](session) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert ["--parts" in line for line in lines] == [False, True, True]
    assert not any("service.cli.main" in line and "import" not in line for line in lines)


def test_gains_are_over_both_neighbours() -> None:
    turns = [("torch", 100.0), ("gemmsmith", 80.0), ("torch", 110.0)]
    found = programs.gains(turns)
    assert found == {"gain": 1.3125, "gains": [1.3125], "torch_over_itself": [0.9091]}
    assert programs.gains([*turns, ("gemmsmith", None)]) == {"gain": None}


@pytest.mark.parametrize("model", ["gpt2", "llama", "qwen3", "qwen3-moe", "vit", "decode"])
def test_the_measured_program_runs(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model, "--tiny", "--device", "cpu", "--steps", "4", "--parts"]
    monkeypatch.setattr(sys, "argv", ["hugging.py", *words])
    hugging.main()
    *steps, parts, last = capsys.readouterr().out.splitlines()
    assert len(steps) == 4
    for times in json.loads(parts)["parts"].values():
        assert 0 < times["host"] <= times["all"]
    assert json.loads(last)["ms"] > 0
