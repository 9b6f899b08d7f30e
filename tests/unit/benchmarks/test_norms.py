"""RMS norms as a GPU session measures them: without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import norms

TINY = ("--tiny", "--device", "cpu")


@pytest.mark.parametrize("model", ["llama", "qwen3-moe", "decode"])
def test_steps_with_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    found = measured(tmp_path, capsys, "--only", "steps", "--model", model)
    (row,) = found["steps"]
    assert row["model"] == model
    assert row["norms"] == (9 if model == "qwen3-moe" else 5)
    for ratio in ("gain", "torch_over_torch"):
        low, high = row[f"{ratio}_interval"]
        assert 0 < low <= row[ratio] <= high
    if model == "decode":
        assert row["same_tokens"] > 0.5
    else:
        assert row["losses"]["fused"] == pytest.approx(row["losses"]["torch"], rel=1e-2)


def test_norms_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in measured(tmp_path, capsys, "--only", "kernels")["kernels"]:
        for passes in ("forward_us", "forward_backward_us"):
            assert set(row[passes]) == {"written_out", "fused"}
            assert min(row[passes].values()) > 0


def test_sums_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in measured(tmp_path, capsys, "--only", "sums")["sums"]:
        assert set(row["us"]) == {"torch", "gemmsmith"}
        assert min(row["us"].values()) > 0


def measured(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, list[dict[str, Any]]]:
    """What a run leaves in its file, which it prints as well."""
    file = folder / "norms.json"
    assert norms.main([*words, *TINY, "-o", str(file)]) == 0
    found: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    (rows,) = (rows for part, rows in found.items() if part in norms.PARTS)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    return found
