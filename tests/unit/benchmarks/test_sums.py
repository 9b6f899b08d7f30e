"""Steps with sums into FP32 as a GPU session measures them: without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sums
from tests.support.shipped import ROOT
from tuner.compile import ArtifactStore
from tuner.exchange import read_winners

SHIPPED = ROOT / "configs/winners/nvidia-h200-132sm.bf16.out_f32.accumulate.jsonl"


def test_a_step_with_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sums.json"
    assert sums.main(["--tiny", "--device", "cpu", "-o", str(output)]) == 0
    document = json.loads(output.read_text())
    (row,) = document["steps"]
    assert json.loads(capsys.readouterr().out) == row
    for ratio in ("gain", "torch_over_torch"):
        low, high = row[f"{ratio}_interval"]
        assert 0 < low <= row[ratio] <= high


def test_what_is_not_compiled_takes_no_part(tmp_path: Path) -> None:
    winners = {winner.problem: winner for winner in read_winners(SHIPPED)}
    best = sums.Best(winners, ArtifactStore(tmp_path))
    assert best.winners == {}
    problem = next(iter(winners))
    asked = (problem.dtype, problem.layout, problem.m, problem.n, problem.k)
    assert best.lookup(*asked) is None


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "sums.json"
    with pytest.raises(SystemExit):
        sums.main(["--device", "cpu", "-o", str(output)])
    assert "name files of winners" in capsys.readouterr().err
    given = [str(SHIPPED), "--device", "cpu", "--packs", str(tmp_path), "-o", str(output)]
    assert sums.main(given) == 1
    assert "gemmsmith compile --winners" in capsys.readouterr().out
    assert not output.exists()
