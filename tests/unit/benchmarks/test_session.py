"""The GPU session's script without a GPU: what it would run, and where it would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import alone, gpu_session
from benchmarks.session import training
from benchmarks.session.core import ROOT, STATE, Session
from benchmarks.session.steps import STEPS
from gemmsmith.core.problem import Problem
from tests.support.serving import winner


def _session(*words: str) -> Session:
    return gpu_session.parse(["test", *words])[1]


def test_the_script_dry_runs_every_step(tmp_path: Path) -> None:
    """And touches nothing of a session that may be running in this checkout."""
    lock = STATE / "session.lock"
    before = lock.stat().st_mtime_ns if lock.exists() else None
    command = [sys.executable, "benchmarks/gpu_session.py", *STEPS, "--dry-run"]
    options = ["--out", str(tmp_path), "--dtype", "bf16", "--device", "cuda:2", "--suite", "x.toml"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (lock.stat().st_mtime_ns if lock.exists() else None) == before
    said = [line for line in done.stdout.splitlines() if line.startswith("$ ")]
    for wanted in (
        "pytest tests/gpu",
        "pytest tests/gpu/test_ranks.py",
        "pytest tests/gpu/test_kernels.py -k not then_ -q",
        "tune 4096 6144 4096 --dtype bf16 --layout tn --device cuda:2",
        f"compile --base --dtype bf16 --packs {ROOT}/.state/base-packs-cuda2-bf16 --json",
        "tune 40 5376 2688 --dtype bf16 --layout tn --device cuda:2 --effort default --again",
        "tune --suite configs/suites/unseen.toml --dtype bf16 --device cuda:2",
        f"benchmarks.session.stability {tmp_path}/stability-winners-cuda2-bf16.jsonl",
        f"bake --winners --dtype bf16 -o {tmp_path}/winners-cuda2-bf16.gspack",
        "compile --suite x.toml --dtype bf16",
        "tune --suite x.toml --dtype bf16 --device cuda:2",
        f"export {tmp_path}/winners-cuda2-bf16.jsonl",
        "record --suite x.toml --dtype bf16 --device cuda:2",
        "benchmarks.peers --dtype bf16 --suite x.toml --device cuda:2",
        "tune --suite configs/suites/train_gpt.toml --dtype bf16 --device cuda:2",
        f"bake --winners -o {tmp_path}/train-cuda2-bf16.gspack",
        "examples/train_gpt.py --model llama-8b-blocks --precision bf16 --mode graph",
        f"bake --suite configs/suites/train_moe.toml --dtype bf16 -o {tmp_path}/train-moe-cuda2",
        "examples/train_qwen3_moe.py --tokens 2048 --steps 63 --winners",
        "examples/train_moe.py --steps 63 --compile --winners",
        "bake --suite configs/suites/train_fused.toml --dtype bf16",
        "examples/train_llama.py --layers 12 --steps 43 --model llama-3-8b --winners",
        "examples/train_gpt.py --model gpt-350m --steps 63 --mode compiled --winners",
        f"benchmarks.host_cost --winners {tmp_path}/train-cuda2-bf16.gspack",
        f"benchmarks.experts --winners {tmp_path}/experts-cuda2-bf16.gspack",
        "benchmarks.norms --model llama --model qwen3 --model qwen3-moe --model decode -o",
        "tune --suite configs/suites/invariant.toml --dtype bf16.sum_sequential --device cuda:0",
        f"export {tmp_path}/winners-cuda2-bf16.sum_sequential.jsonl",
        f"benchmarks.invariance.logits --same {tmp_path}/invariance-logits-1-cuda2-bf16.json",
        f"--without-triton -o {tmp_path}/invariance-cost-without-workspace-cuda2-bf16.json",
        f"ceilings --device cuda:2 -o {tmp_path}/ceilings.json",
        f"--device cuda:2 -o {tmp_path}/alone-cuda2-bf16.json",
        "benchmarks.advice --device cuda:2 --seconds 180 -o",
        f"report -o {tmp_path}/report",
        f"profiles record --time-limit 240 -o {tmp_path}/profiles-cuda2-bf16.jsonl",
    ):
        assert any(wanted in line for line in said), wanted
    for step in STEPS:
        assert f"== {step}: exit 0" in done.stdout
    assert not list(tmp_path.glob("*.json"))


def test_mixtures_train_with_carried_winners_or_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "CARRIED", tmp_path)
    session = _session("--dry-run", "--out", str(tmp_path), "--time-limit", "1000")

    def said() -> list[str]:
        assert STEPS["train_moe"](session) == 0
        return [line.partition(" -m service.cli.main ")[2] or line for line in lines()]

    def lines() -> list[str]:
        return capsys.readouterr().out.splitlines()

    known, bake, *runs = said()
    assert "nvidia-h200-132sm.bf16.group_rows.jsonl" in known
    assert bake.startswith("bake --suite configs/suites/train_moe.toml --dtype bf16")
    assert [run.partition("examples/")[2].partition(" --winners")[0] for run in runs] == [
        "train_qwen3_moe.py --tokens 2048 --steps 63",
        "train_qwen3_moe.py --tokens 16384 --steps 43",
        "train_qwen3_moe.py --tokens 2048 --steps 63 --experts gemmsmith",
        "train_qwen3_moe.py --tokens 16384 --steps 43 --experts gemmsmith",
        "train_moe.py --steps 63",
        "train_qwen3_moe.py --tokens 2048 --steps 63 --compile",
        "train_qwen3_moe.py --tokens 16384 --steps 43 --compile",
        "train_qwen3_moe.py --tokens 2048 --steps 63 --experts gemmsmith --compile",
        "train_qwen3_moe.py --tokens 16384 --steps 43 --experts gemmsmith --compile",
        "train_moe.py --steps 63 --compile",
    ]
    for winners in ("a.jsonl", "b.jsonl"):
        (tmp_path / winners).touch()
    first, second, *again = said()
    assert first == f"import {tmp_path}/a.jsonl {tmp_path}/b.jsonl"
    assert (second, again) == (bake, runs)
    late = _session("--dry-run", "--out", str(tmp_path), "--time-limit", "0")
    assert STEPS["train_moe"](late) == 0
    assert len(lines()) == 2
    other = _session("--dry-run", "--out", str(tmp_path), "--dtype", "fp16")
    assert STEPS["train_moe"](other) == 0
    assert lines() == []


def test_fused_layers_train_with_shipped_winners_where_none_are_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "CARRIED", tmp_path)
    session = _session("--dry-run", "--out", str(tmp_path))
    assert STEPS["train_fused"](session) == 0
    known, _, *runs = capsys.readouterr().out.splitlines()
    assert "nvidia-h200-132sm.bf16.fused.jsonl" in known
    assert len(runs) == 8
    (tmp_path / "a.jsonl").touch()
    assert STEPS["train_fused"](session) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f" import {tmp_path}/a.jsonl")


def test_every_precision_is_recorded_and_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = _session("--dry-run", "--out", str(tmp_path))
    assert STEPS["record"](session) == STEPS["waiting"](session) == STEPS["cold"](session) == 0
    said = capsys.readouterr().out
    for dtype in gpu_session.DTYPES:
        assert f"record --suite configs/suites/sweeps.toml --dtype {dtype}" in said
        assert f"tune 40 5376 2688 --dtype {dtype} --layout tn" in said
    assert "tune 1280 3584 4608 --dtype fp16 --layout tt" in said
    assert "--dtype fp8_e4m3 --layout tt" not in said
    assert "tune --suite configs/suites/llm.toml --dtype fp8_e4m3" in said
    assert "tune 512 3584 18944 --dtype fp16 --layout tt" in said


def test_a_step_that_breaks_does_not_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(_session: Session) -> int:
        raise OSError("no space left on device")

    monkeypatch.setitem(STEPS, "base", breaks)
    code = gpu_session.main(["base", "record", "--dry-run", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 1
    assert "no space left on device" in said.err
    assert '"base": 1, "record": 0' in said.out


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
    "words",
    [
        ("--device", "gpu"),
        ("--problem", "256x4096"),
        ("--problem", "8x8x8x8x8"),
        ("--device", "cuda:x"),
    ],
)
def test_bad_options_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        _session(*words)


def test_without_a_gpu_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("this machine has a GPU")
    assert gpu_session.main(["test", "--out", str(tmp_path)]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().out


def test_typed_problems_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--problem", "2x3x5x70 bf16.group_depth nt", "--time-limit", "100")
    assert STEPS["profile"](_session("--dry-run", "--out", str(tmp_path), *options)) == 0
    said = capsys.readouterr().out
    assert "record --problem 2x3x5x70 bf16.group_depth nt --time-limit 100 -o" in said


def test_each_alone_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    winners = str(ROOT / "configs/winners/nvidia-h200-132sm.fp16.jsonl")
    assert alone.main([winners, "-o", str(tmp_path / "alone.json")]) == 2
    assert "no CUDA GPU 0 on this machine" in capsys.readouterr().out
    assert not (tmp_path / "alone.json").exists()


def test_each_alone_is_told_with_its_power() -> None:
    def turns(*times: float, clock: int, power: float) -> list[alone.Turn]:
        return [
            alone.Turn(us=us, sm_clock_mhz=clock, power_w=power, joules=us * power * 1e-6)
            for us in times
        ]

    line = alone.row(
        winner(Problem(m=256, n=4096, k=4096)),
        {
            "gemmsmith": turns(10.0, 10.2, 10.1, clock=1400, power=690.0),
            "cublas": turns(9.9, 10.0, 10.1, clock=1500, power=650.0),
        },
    )
    assert line["alone"]["median"] == pytest.approx(0.99)
    assert (line["gemmsmith"]["us"], line["cublas"]["power_w"]) == (10.1, 650.0)
    said = alone.line(line)
    assert "256×4096×4096 bf16 tn: alone 0.990, paired" in said
    assert "power penalty 1.075; gemmsmith" in said  # 0.4 of what (1500 / 1400) ** 2.5 is above 1
    assert "gemmsmith 10.10 µs, 1400 MHz, 690 W, 6.97 mJ" in said
    assert alone.line({"problem": "x", "error": "not compiled"}) == "x: not compiled"
