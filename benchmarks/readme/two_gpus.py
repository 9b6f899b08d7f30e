"""A fleet of two GPUs beside one of one, and how far the two GPUs differ."""

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
    """A row for each state of the packs, and what both fleets' winners say of the two GPUs."""
    found = json.loads((RESULTS / FILE).read_text(encoding="utf-8"))
    one, two = found["fleets"]
    lines = [
        f"| {found['suite']} | one H200, {one['cores']} cores | two H200s, {two['cores']} cores "
        "| faster | first to last measurement | faster | GPUs busy in that time |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, title in STAGES.items():
        seconds = [each[stage]["tuning_s"] for each in (one, two)]
        spans = [_span(each[stage]) for each in (one, two)]
        busy = [_busy(each[stage], each["gpus"]) for each in (one, two)]
        lines.append(
            f"| {title} | {seconds[0]:.1f} s | {seconds[1]:.1f} s "
            f"| {seconds[0] / seconds[1]:.2f} × | {spans[0]:.1f} s, {spans[1]:.1f} s "
            f"| {spans[0] / spans[1]:.2f} × | {busy[0]:.1%}, {busy[1]:.1%} |"
        )
    runs = [
        {row["problem"]: row for row in each[stage]["problems"]}
        for each in (one, two)
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
    """Seconds from the first lease of a GPU to the end of the last."""
    leases = stage["gpu_leases"]
    return float(max(one["to_s"] for one in leases) - min(one["from_s"] for one in leases))


def _busy(stage: Mapping[str, Any], gpus: int) -> float:
    """The share of that time in which they had a job."""
    used = sum(one["to_s"] - one["from_s"] for one in stage["gpu_leases"])
    return float(used / (gpus * _span(stage)))


Runs = Sequence[Mapping[str, Any]]


def _pairs(runs: Runs, *, same: bool) -> Iterator[tuple[Any, Any]]:
    """Two tunings of a problem that found the same kernel, by one GPU or by two."""
    for one, other in combinations(runs, 2):
        for problem, row in one.items():
            beside = other[problem]
            if row["kernel"] is None or row["kernel"] != beside["kernel"]:
                continue
            if (row["gpu"] == beside["gpu"]) is same:
                yield row, beside


def _gains(runs: Runs, *, same: bool) -> list[float]:
    return sorted(
        abs(math.log(one["interval"]["median"] / other["interval"]["median"]))
        for one, other in _pairs(runs, same=same)
    )


def _times(runs: Runs, *, same: bool) -> list[float]:
    pairs = _pairs(runs, same=same)
    return sorted(abs(math.log(one["us"] / other["us"])) for one, other in pairs)


def _spread(values: Sequence[float]) -> str:
    most = f"at most {values[-1]:.1%}"
    return (
        f"{median(values):.2%} at the median, {values[int(0.9 * len(values))]:.1%} for 90%, {most}"
    )
