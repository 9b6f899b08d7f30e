"""The report's ratios of cuBLAS's time to ours: of every problem, and of classes of problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from service.charts import draw, intervals
from service.report.problem_rows import DeviceReport, ReportRow

HEIGHT = 340
_LOWEST, _HIGHEST = 0.4, 1.6
"""Ratios outside are drawn at the edge, with their number."""


def ratios(rows: Sequence[ReportRow]) -> Markup:
    """Draw a mark for each problem with its 95% interval, sorted by ratio, and a line at 1."""
    paired = sorted(
        ((row.winner.speedup, row.problem) for row in rows if row.winner.speedup),
        key=lambda pair: pair[0].median,
    )
    if not paired:
        return Markup("")
    bounds = [bound for ratio, _ in paired for bound in (ratio.ci_low, ratio.ci_high)]
    y = draw.Scale(*_edges(bounds), HEIGHT - draw.BOTTOM, draw.TOP, log=True)
    x = draw.Scale(-0.5, len(paired) - 0.5, draw.LEFT, draw.WIDTH - draw.RIGHT)
    parts = [
        draw.vertical_axis(x, y, "time of cuBLAS / ours"),
        draw.path("unity", "M", x.start, y(1.0), "H", x.end),
    ]
    for i, (ratio, problem) in enumerate(paired):
        kind = intervals.kind_of(ratio)
        drawn = draw.path("", "M", x(i), y(ratio.ci_low), "V", y(ratio.ci_high))
        drawn += draw.mark(kind, x(i), y(ratio.median))
        if not y.low <= ratio.median <= y.high:
            label = y(ratio.median) + (16 if ratio.median > y.high else -8)
            drawn += draw.text(x(i), label, f"{ratio.median:.2g}")
        interval = f"{ratio.median:.3f} ({ratio.ci_low:.3f}–{ratio.ci_high:.3f})"
        parts.append(draw.group(kind, f"{problem}: {interval}", drawn))
    parts.append(draw.text((x.start + x.end) / 2, HEIGHT - 10, f"{len(paired)} problems, sorted"))
    return draw.svg(HEIGHT, "Ratio to cuBLAS, problem by problem", *parts)


def classes(report: DeviceReport, dtype: str) -> Markup:
    """Draw the geometric mean of each class of problems, in a bar from minimum to maximum."""
    summaries = [summary for summary in report.summaries if summary.dtype == dtype]
    rows = [
        intervals.Interval(
            name=f"{summary.title.partition(':')[0]} ({summary.problems})",
            kind="won" if summary.geometric_mean >= 1 else "behind",
            low=summary.minimum,
            middle=summary.geometric_mean,
            high=summary.maximum,
            value=f"{summary.geometric_mean:.3f}",
            tooltip=f"{summary.title}: geometric mean {summary.geometric_mean:.3f}, "
            f"median {summary.median:.3f}, "
            f"{summary.minimum:.3f} to {summary.maximum:.3f}",
        )
        for summary in summaries
    ]
    return intervals.chart(
        rows,
        f"Geometric means by class, {dtype}",
        "geometric mean; bars from the minimum to the maximum",
        [(1.0, "unity", "cuBLAS")],
        _edges(bound for row in rows for bound in (row.low, row.high)),
    )


def _edges(bounds: Iterable[float]) -> tuple[float, float]:
    shown = [0.9, 1.1, *bounds]
    return max(_LOWEST, min(shown) * 0.98), min(_HIGHEST, max(shown) * 1.02)
