"""The suite of what another GPU's winners are for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import missing
from gemmsmith.core.problem import Problem
from tests.support.records import DEVICE, OTHER_DEVICE, winner
from tuner.exchange import read_winners
from tuner.suites import load


def test_a_problem_of_another_gpu_alone_is_missing(tmp_path: Path) -> None:
    both = Problem(m=16, n=4096, k=4096)
    grouped = Problem(m=256, n=768, k=2048, batch=8, dtype="fp16.group_rows")
    fused = Problem(m=64, n=512, k=256, dtype="bf16.then_bias_gelu")
    records = [
        winner(both),
        replace(winner(both), device=OTHER_DEVICE),
        replace(winner(grouped), device=OTHER_DEVICE),
        replace(winner(fused), device=OTHER_DEVICE),
    ]
    lacked = missing.missing(records, DEVICE.slug)
    problems = sorted(lacked.problems)
    assert problems == [fused, grouped]
    file = tmp_path / "missing.toml"
    lacked.save(file)
    entries = load(file).entries
    assert [(each.m, each.n, each.k, each.batch, each.layout) for each in entries] == [
        (each.m, each.n, each.k, each.batch, each.layout) for each in problems
    ]
    assert not missing.missing(records, OTHER_DEVICE.slug).problems


def test_the_shipped_winners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "missing.toml"
    assert missing.main(["--gpu", OTHER_DEVICE.slug, "-o", str(file)]) == 0
    problems = {
        record.problem for path in missing.WINNERS.glob("*.jsonl") for record in read_winners(path)
    }
    assert len(load(file).entries) == len(problems)
    suite = load(file)
    assert {problem for dtype in suite.dtypes for _, problem in suite.problems(dtype)} == problems
    assert capsys.readouterr().out.startswith(f"{len(problems)} problems")
