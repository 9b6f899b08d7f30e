"""Padding advice is written before it is measured, and then compared with what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import advice
from gemmsmith.core.problem import Problem
from tests.support.commands import new_database
from tests.support.recordings import BEST_US, record
from tuner.explain.padding import unaligned

SMALL = Problem(m=64, n=1001, k=64)
PADDED = Problem(m=64, n=1008, k=64)


def test_sizes_are_ten_that_are_not_aligned() -> None:
    assert len(set(advice.SIZES)) == 10
    assert all(map(unaligned, advice.SIZES))


def test_a_prediction_is_written_and_then_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_database(tmp_path, monkeypatch, ())
    sweep = record(tmp_path, SMALL, PADDED)
    unrecorded = Problem(m=64, n=67, k=128)
    monkeypatch.setattr(advice, "SIZES", (unrecorded, SMALL))
    output = tmp_path / "advice.json"
    assert advice.main(["--device", f"replay:{sweep}", "-o", str(output)]) == 0
    document = json.loads(output.read_text())
    assert (document["of"], document["measured"]) == (2, 1)
    missing, row = document["rows"]
    assert "error" in missing
    assert (row["problem"], row["padded"]) == (str(SMALL), str(PADDED))
    assert row["us"] == pytest.approx(BEST_US, rel=0.01)
    assert row["predicted"] == pytest.approx(row["us"] / row["predicted_us"], rel=1e-3)
    assert row["measured"] == pytest.approx(1.0, abs=0.01)
    assert row["off"] == pytest.approx(row["predicted"] / row["measured"] - 1, abs=1e-3)
    assert document["near"] == 0


def test_no_size_is_begun_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_database(tmp_path, monkeypatch, ())
    sweep = record(tmp_path, SMALL, PADDED)
    output = tmp_path / "advice.json"
    words = ["--device", f"replay:{sweep}", "--seconds", "-1", "-o", str(output)]
    assert advice.main(words) == 1
