"""A fleet of two GPUs and a fleet of one, and how much the two GPUs differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.readme.shipped import RESULTS

FILE = "2026-11-24-h200-two-gpus.json"
STAGES = {"cold": "nothing compiled", "warm": "everything compiled"}


def table() -> str:
    """Write a row for each state of the packs, and the differences between the two GPUs."""
    result = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))
    fleets = result["fleets"]
    cores = [fleet["cores"] for fleet in fleets]
    lines = [
        f"| {result['suite']} | one H200, {cores[0]} cores | two H200s, {cores[1]} cores "
        "| faster | first to last measurement | faster | GPUs busy in that time |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, title in STAGES.items():
        seconds = [fleet[stage]["tuning_s"] for fleet in fleets]
        spans = [_span(fleet[stage]) for fleet in fleets]
        busy = [_busy(fleet[stage], fleet["gpus"]) for fleet in fleets]
        lines.append(
            f"| {title} | {seconds[0]:.1f} s | {seconds[1]:.1f} s "
            f"| {seconds[0] / seconds[1]:.2f} × | {spans[0]:.1f} s, {spans[1]:.1f} s "
            f"| {spans[0] / spans[1]:.2f} × | {busy[0]:.1%}, {busy[1]:.1%} |"
        )
    runs = [
        {row["problem"]: row for row in fleet[stage]["problems"]}
        for fleet in fleets
        for stage in STAGES
    ]
    lines += [
        "",
        "| the same kernel on the same problem, two tunings | by the same GPU | by the other GPU |",
        "|---|---|---|",
        f"| pairs | {len(_gains(runs, same=True))} | {len(_gains(runs, same=False))} |",
        f"| speed-ups over the default differ by | {_spread(_gains(runs, same=True))} "
        f"| {_spread(_gains(runs, same=False))} |",
        f"| times differ by | {_spread(_times(runs, same=True))} "
        f"| {_spread(_times(runs, same=False))} |",
    ]
    return "\n".join(lines)


def _span(stage: Mapping[str, Any]) -> float:
    """Return the seconds from the begin of a GPU's first lease to the end of the last one."""
    leases = stage["gpu_leases"]
    return float(max(lease["to_s"] for lease in leases) - min(lease["from_s"] for lease in leases))


def _busy(stage: Mapping[str, Any], gpus: int) -> float:
    """Return the share of that time in which the GPUs had a job."""
    used = sum(lease["to_s"] - lease["from_s"] for lease in stage["gpu_leases"])
    return float(used / (gpus * _span(stage)))


Runs = Sequence[Mapping[str, Any]]


def _pairs(runs: Runs, *, same: bool) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of tunings of a problem with the same kernel, by the same GPU or by two."""
    for first, second in combinations(runs, 2):
        for problem, row in first.items():
            other = second[problem]
            if row["kernel"] is None or row["kernel"] != other["kernel"]:
                continue
            if (row["gpu"] == other["gpu"]) is same:
                yield row, other


def _gains(runs: Runs, *, same: bool) -> list[float]:
    return sorted(
        abs(math.log(row["interval"]["median"] / other["interval"]["median"]))
        for row, other in _pairs(runs, same=same)
    )


def _times(runs: Runs, *, same: bool) -> list[float]:
    pairs = _pairs(runs, same=same)
    return sorted(abs(math.log(row["us"] / other["us"])) for row, other in pairs)


def _spread(values: Sequence[float]) -> str:
    most = f"at most {values[-1]:.1%}"
    return (
        f"{median(values):.2%} at the median, {values[int(0.9 * len(values))]:.1%} for 90%, {most}"
    )
