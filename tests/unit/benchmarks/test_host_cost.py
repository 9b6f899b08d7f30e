"""What a call costs the host is measured for every way to multiply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.session.core import ROOT
from benchmarks.session.training import summary


def test_every_way_is_timed_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- host cost -->\nold\n<!-- /host cost -->\nafter\n")
    command = [sys.executable, "-m", "benchmarks.host_cost", "--calls", "100"]
    command += ["-o", str(output), "--page", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text())
    first, mark, head, _, *rows, end, last = page.read_text().splitlines()
    assert (first, mark, end, last) == (
        "before", "<!-- host cost -->", "<!-- /host cost -->", "after",
    )  # fmt: skip
    assert head == "| | forward | forward and both gradients |"
    assert len(rows) == 12
    assert rows[8].startswith("| F.grouped_mm | ")
    assert rows[0].startswith(f"| F.linear | {document['costs'][0]['us']:.1f} µs | ")
    assert document["problem"] == "2x8x8 bf16"
    assert document["experts"] == "2×8×16×16 bf16.group_rows tn"
    ways = [cost["way"] for cost in document["costs"]]
    assert len(ways) == len(set(ways)) == 24
    for cost in document["costs"]:
        assert cost["calls"] == 100
        assert 0 < cost["low_us"] <= cost["us"] <= cost["high_us"]
        assert f"{cost['us']:8.2f} µs" in done.stdout


def test_a_runs_curves_stay_in_its_own_file() -> None:
    found = summary(
        {
            "device": "x",
            "torch": "2",
            "tokens_per_second": {"torch": 1.0, "gemmsmith": 2.0},
            "speedup": {"median": 2.0},
            "torch_over_itself": {"median": 1.0},
            "seconds": {"torch": [0.5], "gemmsmith": [0.25], "torch again": [0.5]},
            "product_us_per_step": {"torch": None, "gemmsmith": None},
            "step_memory_bytes": {"torch": None, "gemmsmith": None},
            "losses": {"torch": [3.0, 1.5], "gemmsmith": [3.0, 1.25]},
            "largest_difference_of_losses": 0.25,
            "steps": 2,
        }
    )
    assert found["last_losses"] == {"torch": 1.5, "gemmsmith": 1.25}
    assert "losses" not in found
