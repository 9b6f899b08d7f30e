"""The training examples run, without a GPU too, and both sides learn the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("train_gpt.py", ("--model", "tiny", "--precision", "bf16")),
        pytest.param("train_gpt.py", ("--model", "tiny", "--precision", "fp8"), marks=LONG),
        pytest.param("train_llama.py", ("--model", "tiny"), marks=LONG),
        pytest.param("train_moe.py", ("--tiny",), marks=LONG),
        pytest.param("train_qwen3_moe.py", ("--tiny",), marks=LONG),
        pytest.param("train_qwen3_moe.py", ("--tiny", "--experts", "gemmsmith"), marks=LONG),
    ],
)
def test_training(tmp_path: Path, script: str, options: tuple[str, ...]) -> None:
    output = tmp_path / "result.json"
    more = ("--steps", "13", "-o", str(output), "--device", "cpu")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options, *more],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # so little is multiplied that threads only wait
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    result = json.loads(output.read_text())
    losses = result["losses"]
    assert len(losses["torch"]) == len(losses["gemmsmith"]) == 13
    # Without winners all run torch, though a layer of our own rounds in other places.
    assert losses["torch"] == losses["torch again"]
    if "--experts" in options:
        assert losses["gemmsmith"] == pytest.approx(losses["torch"], abs=0.05)
    else:
        assert losses["gemmsmith"] == losses["torch"]
    assert losses["torch"][-1] < losses["torch"][0]
    assert set(result["tokens_per_second"]) == {"torch", "gemmsmith", "torch again"}
    for ratio in (result["speedup"], result["torch_over_itself"]):
        assert ratio["ci_low"] <= ratio["median"] <= ratio["ci_high"]


def test_too_few_steps_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--steps must be at least 8" in done.stderr
