"""The table of a report: a line for each problem, and a column of ratios for each peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.peers.records import BASELINE, Report, Row

GEMMSMITH = "gemmsmith"


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def ratios(rows: Sequence[Row], peer: str) -> dict[int, float]:
    """Return the peer's median ratios by index of row, of rows that have one."""
    return {
        index: entry.ratio.median
        for index, row in enumerate(rows)
        if (entry := row.entries.get(peer)) is not None and entry.ratio is not None
    }


def as_answered(rows: Sequence[Row]) -> dict[int, float]:
    """Return gemmsmith's ratios as a caller gets them: 1 where it serves cuBLAS."""
    return {
        index: 1.0 if rows[index].use == BASELINE else ratio
        for index, ratio in ratios(rows, GEMMSMITH).items()
    }


def markdown(report: Report, peers: Sequence[str]) -> str:
    """Write the table, with geometric means and their counts, and reasons of empty cells."""
    columns = [peer for peer in peers if peer != BASELINE and peer not in report.unavailable]
    rows = report.rows
    of_peers = {peer: ratios(rows, peer) for peer in columns}
    if GEMMSMITH in columns:
        of_peers[f"{GEMMSMITH}, as answered"] = as_answered(rows)
    device = report.device.name if report.device else "no GPU"
    lines = [
        f"{report.dtype} on {device}: cuBLAS's time over the peer's (above 1: the peer is faster)",
        "",
        "| problem | cuBLAS µs | " + " | ".join(of_peers) + " |",
        "|---|---|" + "---|" * len(of_peers),
    ]
    for index, row in enumerate(rows):
        baseline = row.entries.get(BASELINE)
        time = f"{baseline.statistics.median_us:.1f}" if baseline and baseline.statistics else "—"
        cells = [f"{of[index]:.3f}" if index in of else "—" for of in of_peers.values()]
        lines.append(f"| {_named(row)} | {time} | " + " | ".join(cells) + " |")
    everywhere = set(range(len(rows))).intersection(*(set(of) for of in of_peers.values() if of))
    lines += [
        _summary("geometric mean (count)", [list(of.values()) for of in of_peers.values()]),
        _summary(
            "geometric mean where all ran",
            [[of[i] for i in sorted(everywhere)] if of else [] for of in of_peers.values()],
        ),
        _tuning(rows, list(of_peers)),
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
    """Write each peer's mean seconds of preparation, over the problems that it ran on."""
    cells = []
    for name in names:
        seconds = [
            entry.tuning_s
            for row in rows
            if (entry := row.entries.get(name)) is not None and entry.ratio is not None
        ]
        cells.append(f"{sum(seconds) / len(seconds):.1f}" if seconds else "")
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
