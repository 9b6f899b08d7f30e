"""One layer of experts as a GPU session measures it: without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.session.core import ROOT


def test_a_layer_on_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.experts", "--tiny", "--device", "cpu"),
            *("--mode", "eager", "-o", str(file)),
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["layers"]
    assert json.loads(done.stdout) == row
    for ratio in ("gain", "torch_over_torch"):
        low, high = row[f"{ratio}_interval"]
        assert 0 < low <= row[ratio] <= high
    # The result, and the gradients of the tokens, the router and both weights.
    assert len(row["relative_differences"]) == 5
    assert max(row["relative_differences"]) < 0.02
