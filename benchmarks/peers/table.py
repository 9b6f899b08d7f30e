"""The table of a report: one line a problem, one column a peer, ratios to cuBLAS's default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.peers.records import BASELINE, Report, Row

GEMMSMITH = "gemmsmith"


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def ratios(rows: Sequence[Row], peer: str) -> dict[int, float]:
    """The peer's median ratio by index of row, where it has one."""
    return {
        index: entry.ratio.median
        for index, row in enumerate(rows)
        if (entry := row.entries.get(peer)) is not None and entry.ratio is not None
    }


def as_answered(rows: Sequence[Row]) -> dict[int, float]:
    """gemmsmith as a caller gets it: where its record says cuBLAS, it runs cuBLAS."""
    return {
        index: 1.0 if rows[index].use == BASELINE else ratio
        for index, ratio in ratios(rows, GEMMSMITH).items()
    }


def markdown(report: Report, peers: Sequence[str]) -> str:
    """Problem by peer, geometric means with their counts, and why cells are empty."""
    columns = [peer for peer in peers if peer != BASELINE and peer not in report.unavailable]
    rows = report.rows
    of = {peer: ratios(rows, peer) for peer in columns}
    if GEMMSMITH in columns:
        of[f"{GEMMSMITH}, as answered"] = as_answered(rows)
    device = report.device.name if report.device else "no GPU"
    lines = [
        f"{report.dtype} on {device}: cuBLAS's time over the peer's (above 1: the peer is faster)",
        "",
        "| problem | cuBLAS µs | " + " | ".join(of) + " |",
        "|---|---|" + "---|" * len(of),
    ]
    for index, row in enumerate(rows):
        baseline = row.entries.get(BASELINE)
        time = f"{baseline.statistics.median_us:.1f}" if baseline and baseline.statistics else "—"
        cells = [f"{of[name][index]:.3f}" if index in of[name] else "—" for name in of]
        lines.append(f"| {_named(row)} | {time} | " + " | ".join(cells) + " |")
    everywhere = set(range(len(rows))).intersection(*(set(found) for found in of.values() if found))
    lines += [
        _summary("geometric mean (count)", [list(found.values()) for found in of.values()]),
        _summary(
            "geometric mean where all ran",
            [[found[i] for i in sorted(everywhere)] if found else [] for found in of.values()],
        ),
        _tuning(rows, list(of)),
    ]
    return "\n".join([*lines, "", *_reasons(report, columns)])


def _named(row: Row) -> str:
    p = row.problem
    batch = f"{p.batch}×" if p.batch > 1 else ""
    return f"{batch}{p.m}×{p.n}×{p.k} {p.layout}"


def _summary(title: str, columns: Sequence[Sequence[float]]) -> str:
    cells = []
    for values in columns:
        mean = geometric_mean(values)
        cells.append("—" if mean is None else f"{mean:.3f} ({len(values)})")
    return f"| **{title}** | | " + " | ".join(cells) + " |"


def _tuning(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Seconds a peer took to get ready, the mean over the problems it ran on."""
    cells = []
    for name in names:
        spent = [
            entry.tuning_s
            for row in rows
            if (entry := row.entries.get(name)) is not None and entry.ratio is not None
        ]
        cells.append(f"{sum(spent) / len(spent):.1f}" if spent else "")
    return "| **s to prepare a problem** | | " + " | ".join(cells) + " |"


def _reasons(report: Report, columns: Sequence[str]) -> list[str]:
    lines = [f"- {peer}: {reason}" for peer, reason in report.unavailable.items()]
    for row in report.rows:
        if row.failure:
            lines.append(f"- {_named(row)}: {row.failure}")
        for peer in columns:
            entry = row.entries.get(peer)
            if entry is not None and entry.reason:
                lines.append(f"- {_named(row)}, {peer}: {entry.reason}")
    return lines
