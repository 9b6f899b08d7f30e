"""The report's own pictures: ratios with their intervals, and the classes' means."""

from __future__ import annotations

from collections.abc import Sequence

from service.report.axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    grid_line,
    linear,
    log_scale,
    mark,
    svg,
    text,
    title,
    upright,
)
from service.report.rows import DeviceReport, ReportRow, Summary

_RATIO_FLOOR, _RATIO_TOP = 0.4, 1.6
"""Ratios beyond are drawn at the edge, with their number."""
_RATIO_TICKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)


def ratios(rows: Sequence[ReportRow]) -> str:
    """One mark a problem with its 95% interval, sorted by ratio, and a line at 1."""
    listed = sorted(
        ((row.winner.speedup, row) for row in rows if row.winner.speedup),
        key=lambda pair: pair[0].median,
    )
    if not listed:
        return ""
    height = 340
    low = max(_RATIO_FLOOR, min(0.9, *(ratio.ci_low for ratio, _ in listed)) * 0.98)
    top = min(_RATIO_TOP, max(1.1, *(ratio.ci_high for ratio, _ in listed)) * 1.02)
    y = log_scale(low, top, height - BOTTOM, TOP)
    x = linear(-0.5, len(listed) - 0.5, LEFT, WIDTH - RIGHT)
    ticks = [tick for tick in _RATIO_TICKS if low <= tick <= top]
    parts = [grid_line(y(tick), f"{tick:g}", strong=tick == 1.0) for tick in ticks]
    for i, (ratio, row) in enumerate(listed):
        shape = "won" if ratio.ci_low > 1 else "behind" if ratio.ci_high < 1 else "tie"
        here = min(max(ratio.median, low), top)
        bar = (max(ratio.ci_low, low), min(ratio.ci_high, top))
        drawn = f'<g class="{shape}">'
        if bar[0] < bar[1]:
            drawn += f'<path d="M{x(i):.1f} {y(bar[0]):.1f}V{y(bar[1]):.1f}"/>'
        drawn += mark(shape, x(i), y(here))
        if here != ratio.median:
            dy = 16 if ratio.median > top else -8
            drawn += text(x(i), y(here) + dy, f"{ratio.median:.2g}", "middle")
        interval = f"{ratio.median:.3f} ({ratio.ci_low:.3f}–{ratio.ci_high:.3f})"
        parts.append(drawn + title(f"{row.problem}: {interval}") + "</g>")
    parts.append(text(WIDTH / 2, height - 10, f"{len(listed)} problems, sorted", "middle"))
    parts.append(upright(height, "time of cuBLAS / ours"))
    return svg(height, "Ratio to cuBLAS, problem by problem", parts)


def classes(report: DeviceReport, dtype: str) -> str:
    """A class a line: its geometric mean, and the span from its minimum to its maximum."""
    listed = [summary for summary in report.summaries if summary.dtype == dtype]
    if not listed:
        return ""
    height = TOP + 28 * len(listed) + BOTTOM
    low = max(_RATIO_FLOOR, min(0.9, *(s.minimum for s in listed)) * 0.98)
    top = min(_RATIO_TOP, max(1.1, *(s.maximum for s in listed)) * 1.02)
    x = log_scale(low, top, 300, WIDTH - 120)
    parts = []
    for tick in _RATIO_TICKS:
        if low <= tick <= top:
            kind = "one" if tick == 1.0 else "grid"
            parts.append(
                f'<path class="{kind}" d="M{x(tick):.1f} {TOP}V{height - BOTTOM}"/>'
                + text(x(tick), height - BOTTOM + 16, f"{tick:g}", "middle")
            )
    for i, summary in enumerate(listed):
        parts.append(_class_line(summary, TOP + 28 * i + 14, (low, top), x))
    return svg(height, f"Geometric means by class, {dtype}", parts)


def _class_line(summary: Summary, at: float, edges: tuple[float, float], x: Scale) -> str:
    low, top = edges
    ends = [min(max(value, low), top) for value in (summary.minimum, summary.maximum)]
    mean = min(max(summary.geometric_mean, low), top)
    shape = "won" if summary.geometric_mean >= 1 else "behind"
    name = summary.title.partition(":")[0]
    return (
        f'<g class="{shape}"><path class="span" d="M{x(ends[0]):.1f} {at:.1f}H{x(ends[1]):.1f}"/>'
        + mark(shape, x(mean), at, 5)
        + text(290, at + 4, f"{name} ({summary.problems})", "end")
        + text(WIDTH - 110, at + 4, f"{summary.geometric_mean:.3f}", "start")
        + title(
            f"{summary.title}: geometric mean {summary.geometric_mean:.3f}, "
            f"median {summary.median:.3f}, "
            f"{summary.minimum:.3f} to {summary.maximum:.3f}"
        )
        + "</g>"
    )
