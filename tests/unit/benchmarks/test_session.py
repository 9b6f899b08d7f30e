"""The GPU session's script without a GPU: what it would run, and where it would write."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_session, profile
from benchmarks.session.core import ROOT, Session
from benchmarks.session.profiling import METRICS, chosen_metrics, shrunk
from benchmarks.session.steps import STEPS


def _session(*words: str) -> Session:
    return gpu_session.parse(["test", *words])[1]


def test_the_script_dry_runs_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_session.py", *STEPS, "--dry-run"]
    options = ["--out", str(tmp_path), "--dtype", "bf16", "--device", "cuda:2", "--suite", "x.toml"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("$ ")]
    for wanted in (
        "pytest tests/gpu",
        "tune 4096 6144 4096 --device cuda:2 --again",
        "compile --suite x.toml --dtype bf16",
        "tune --suite x.toml --dtype bf16 --device cuda:2",
        f"export {tmp_path}/winners-cuda2-bf16.jsonl",
        "record --suite configs/suites/sweeps.toml --dtype bf16 --device cuda:2",
        "benchmarks.peers --dtype bf16 --suite x.toml --device cuda:2",
        f"ceilings --device cuda:2 -o {tmp_path}/ceilings.json",
        f"report -o {tmp_path}/report",
        "benchmarks.profile 256 4096 4096 --dtype bf16",
        "ncu --csv --page raw --metrics gpu__time_duration.sum",
    ):
        assert any(wanted in line for line in said), wanted
    for step in STEPS:
        assert f"== {step}: exit 0" in done.stdout


def test_every_step_is_in_the_help() -> None:
    for step in STEPS:
        assert f"\n    {step} " in (gpu_session.__doc__ or "")


def test_sessions_beside_each_other_have_files_of_their_own(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    first = _session(*out, "--dtype", "bf16")
    second = _session(*out, "--dtype", "fp16", "--device", "cuda:1")
    everything = _session(*out)
    assert first.database() == f"sqlite:///{tmp_path}/gemmsmith-cuda0-bf16.db"
    assert second.database() == f"sqlite:///{tmp_path}/gemmsmith-cuda1-fp16.db"
    assert everything.database() == f"sqlite:///{tmp_path}/gemmsmith-cuda0.db"
    assert second.file("tune", ".log", "fp16").name == "tune-cuda1-fp16.log"
    assert everything.file("tune", ".log", "fp16").name == "tune-cuda0-fp16.log"


def test_the_tests_see_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _session("--device", "cuda:3").only_device() == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _session("--device", "cuda:1").only_device() == {"CUDA_VISIBLE_DEVICES": "6"}


@pytest.mark.parametrize(
    "words", [("--device", "gpu"), ("--problem", "256x4096"), ("--device", "cuda:x")]
)
def test_bad_options_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        _session(*words)


def test_without_a_gpu_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("this machine has a GPU")
    assert gpu_session.main(["test", "--out", str(tmp_path)]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().out
    assert profile.main(["256", "4096", "4096", "--database", ""]) == 2
    assert profile.main(["3", "5", "7", "--database", ""]) == 1


def test_metrics_follow_what_the_profiler_knows() -> None:
    assert set(METRICS) < set(chosen_metrics(()))
    listed = ["gpu__time_duration", "sm__inst_executed_pipe_tensor_b", "lts__t_sectors"]
    found = chosen_metrics([*listed, "sm__inst_executed_pipe_tensor_a"])
    assert found[:2] == ["gpu__time_duration.sum", "lts__t_sectors.sum"]
    assert found[2:4] == [
        "sm__inst_executed_pipe_tensor_a.sum",
        "sm__inst_executed_pipe_tensor_b.sum",
    ]
    assert all(name.startswith("launch__") for name in found[4:])


def test_a_profile_is_cut_down() -> None:
    raw = (
        "==PROF== Connected\n"
        '"ID","Host Name","Kernel Name","gpu__time_duration.sum"\n'
        '"","","","us"\n'
        f'"0","somewhere","gemm<{"x" * 500}>","12.5"\n'
        "==PROF== Disconnected\n"
    )
    rows = list(csv.reader(io.StringIO(shrunk(raw))))
    assert rows[0] == ["ID", "Kernel Name", "gpu__time_duration.sum"]
    assert rows[2][2] == "12.5"
    assert len(rows[2][1]) < 200
    assert shrunk("==ERROR== nothing") == ""
