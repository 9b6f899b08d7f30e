"""The step that compares a fleet of one GPU with one of two, and the archive that carries Ray."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_session, site
from benchmarks.session import core, fleet
from benchmarks.session.core import ROOT
from benchmarks.session.steps import STEPS


def test_the_smaller_fleet_comes_first_on_half_of_the_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "gpus", lambda: 2)
    monkeypatch.setattr(fleet, "CORES", 2)
    options = ["--dry-run", "--out", str(tmp_path), "--suite", "x.toml", "--dtype", "fp16"]
    session = gpu_session.parse(["fleet", *options, "--effort", "quick"])[1]
    assert STEPS["fleet"](session) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    started = [line for line in lines if " start --head " in line]
    assert [
        " ".join(word for word in line.split() if word.startswith("--num-")) for line in started
    ] == ["--num-cpus=1 --num-gpus=1", "--num-cpus=2 --num-gpus=2"]
    tuned = [line.partition(" tune ")[2] for line in lines if " tune " in line]
    assert tuned == 4 * [
        "--suite x.toml --dtype fp16 --fleet --again --effort quick --json",
    ]
    assert len([line for line in lines if line.endswith(" stop --force")]) == 2


def test_a_row_says_which_gpu_measured_a_problem() -> None:
    result = {
        "use": "cutlass",
        "candidate": {"kernel": {"name": "a kernel"}},
        "environment": {"gpu_uuid": "GPU-1"},
        "speedup": {"median": 1.1, "ci_low": 1.0, "ci_high": 1.2},
        "statistics": {"median_us": 10.0},
        "baseline": {"median_us": 11.0},
    }
    problem = {"m": 1, "n": 2, "k": 3, "dtype": "fp16", "layout": "tn", "batch": 1}
    outcome = {"problem": problem, "status": "tuned", "seconds": 1.5, "answered": None}
    row = fleet.described(outcome | {"error": None, "result": result})
    assert (row["problem"], row["gpu"], row["us"]) == ("1x2x3 fp16 tn", "GPU-1", 10.0)
    assert fleet.described(outcome | {"error": "it failed", "result": None})["gpu"] is None


def test_an_archive_of_wheels_is_unpacked_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / ".wheels"
    wheels.mkdir()
    for name, files in {
        "ray": {"ray/__init__.py": "", "ray/jars/all.jar": "java"},
        "other": {"other.py": "said = 1\n"},
        "known": {"known.py": ""},
    }.items():
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)
    command = [sys.executable, str(ROOT / "benchmarks/site.py"), str(wheels), "known-*"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{wheels / site.ARCHIVE}: ")
    with tarfile.open(wheels / site.ARCHIVE) as tar:
        assert sorted(tar.getnames()) == ["other.py", "ray/__init__.py"]
    for name in ("ROOT", "SITE", "STATE"):
        monkeypatch.setattr(core, name, tmp_path / {"ROOT": "."}.get(name, name))
    core.STATE.mkdir()
    session = gpu_session.parse(["fleet", "--out", str(tmp_path)])[1]
    assert core._install(session, tmp_path / "log") == 0
    assert (core.SITE / "other.py").read_text() == "said = 1\n"
