"""The training example runs, without a GPU too, and both sides learn the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_train_gpt(tmp_path: Path, precision: str) -> None:
    output = tmp_path / "result.json"
    options = ("--model", "tiny", "--steps", "13", "--precision", precision, "-o", str(output))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--device", "cpu"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    result = json.loads(output.read_text())
    losses = result["losses"]
    assert len(losses["torch"]) == len(losses["gemmsmith"]) == 13
    # Without winners all run torch.
    assert losses["torch"] == losses["gemmsmith"] == losses["torch again"]
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
