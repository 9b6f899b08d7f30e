"""The service under load, from the newest run of `python -m benchmarks.load`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.readme.shipped import RESULTS


def _ratio(entry: dict[str, Any], name: str) -> str:
    low, high = entry["ranges"][name]
    return f"{entry['ratios'][name]:.2f} ({low:.2f} … {high:.2f})"


def table() -> str:
    """Write a row for each load."""
    newest = max(RESULTS.glob("*-load.json"))
    result = json.loads(newest.read_text(encoding="utf-8"))
    lines = [
        "| request | requests/s | p99 | requests/s over the baseline's | p99 over the baseline's |",
        "|---|---|---|---|---|",
    ]
    for entry in sorted(result["load"], key=lambda entry: "loads" not in entry):
        if "loads" not in entry:
            first = f"{entry['first_ms'] / 1000:.1f} s for the first request"
            lines.append(f"| {entry['what']} | – | {entry['median_ms']:.0f} ms; {first} | – | – |")
            continue
        mine = next(iter(entry["loads"].values()))
        lines.append(
            f"| {entry['what']} | {mine['per_second']:,.0f} | {mine['p99_ms']:.1f} ms "
            f"| {_ratio(entry, 'requests')} | {_ratio(entry, 'p99')} |"
        )
    lines += ["", f"From [{newest.name}](../benchmarks/results/{newest.name})."]
    return "\n".join(lines)
