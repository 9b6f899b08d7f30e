"""One layer of experts as a GPU session measures it: without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts


def test_a_layer_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "experts.json"
    words = ["--tiny", "--device", "cpu", "--mode", "eager", "--host", "-o", str(file)]
    assert experts.main(words) == 0
    (row,) = json.loads(file.read_text())["layers"]
    assert json.loads(capsys.readouterr().out) == row
    for ratio in ("gain", "torch_over_torch"):
        low, high = row[f"{ratio}_interval"]
        assert 0 < low <= row[ratio] <= high
    # The result, and the gradients of the tokens, the router and both weights.
    assert len(row["relative_differences"]) == 5
    assert max(row["relative_differences"]) < 0.02
    for functions in row["host_functions"].values():
        assert all(0 <= one["own_us"] <= one["us"] for one in functions)
    ours = {one["function"]: one["calls"] for one in row["host_functions"]["gemmsmith"]}
    assert ours["~:<built-in method torch._grouped_mm>"] == 6  # the backward pass is seen too
