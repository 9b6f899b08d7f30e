"""Pictures as inline SVG: ratios with their intervals, the roofline, and the classes' means.

Colours are the page's custom properties, so that they follow its light and dark schemes; state is
shown by shape too, not by colour alone. All text is escaped. No scripts: a point's `<title>` is
what a browser shows when it is pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from gemmsmith.problem import DType
from service.report.rows import DeviceReport, Row, Side, Summary
from tuner.measure.ceilings import Ceilings

WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40
_RATIO_FLOOR, _RATIO_TOP = 0.4, 1.6
"""Ratios beyond are drawn at the edge, with their number."""
_RATIO_TICKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)

Scale = Callable[[float], float]


def ratios(rows: Sequence[Row]) -> str:
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
    y = _log_scale(low, top, height - _BOTTOM, _TOP)
    x = _linear(-0.5, len(listed) - 0.5, _LEFT, WIDTH - _RIGHT)
    ticks = [tick for tick in _RATIO_TICKS if low <= tick <= top]
    parts = [_grid_line(y(tick), f"{tick:g}", strong=tick == 1.0) for tick in ticks]
    for i, (ratio, row) in enumerate(listed):
        shape = "won" if ratio.ci_low > 1 else "behind" if ratio.ci_high < 1 else "tie"
        here = min(max(ratio.median, low), top)
        bar = (max(ratio.ci_low, low), min(ratio.ci_high, top))
        drawn = f'<g class="{shape}">'
        if bar[0] < bar[1]:
            drawn += f'<path d="M{x(i):.1f} {y(bar[0]):.1f}V{y(bar[1]):.1f}"/>'
        drawn += _mark(shape, x(i), y(here))
        if here != ratio.median:
            dy = 16 if ratio.median > top else -8
            drawn += _text(x(i), y(here) + dy, f"{ratio.median:.2g}", "middle")
        interval = f"{ratio.median:.3f} ({ratio.ci_low:.3f}–{ratio.ci_high:.3f})"
        parts.append(drawn + _title(f"{row.problem}: {interval}") + "</g>")
    parts.append(_text(WIDTH / 2, height - 10, f"{len(listed)} problems, sorted", "middle"))
    parts.append(_upright(height, "time of cuBLAS / ours"))
    return _svg(height, "Ratio to cuBLAS, problem by problem", parts)


def roofline(rows: Sequence[Row], dtype: DType, ceilings: Ceilings | None) -> str:
    """TFLOP/s over FLOP per byte, both logarithmic; the roof is drawn where it was measured."""
    points = [(row, row.cutlass, row.cublas) for row in rows if row.cutlass and row.cublas]
    if not points:
        return ""
    height = 420
    peak = ceilings.peak(dtype) if ceilings else None
    rates = [side.flops_per_second / 1e12 for _, a, b in points for side in (a, b)]
    places = [row.intensity for row, *_ in points]
    if ceilings and peak:
        rates.append(peak / 1e12)
        places.append(peak / ceilings.bandwidth)
    left, right = min(places) / 1.5, max(places) * 1.5
    low, top = min(rates) / 1.5, max(rates) * 1.5
    x = _log_scale(left, right, _LEFT, WIDTH - _RIGHT)
    y = _log_scale(low, top, height - _BOTTOM, _TOP)
    parts = [_grid_line(y(tick), f"{tick:g}") for tick in _decades(low, top)]
    parts += [_grid_column(x(tick), f"{tick:g}", height) for tick in _decades(left, right)]
    if ceilings and peak:
        parts.append(_roof(ceilings.bandwidth / 1e12, peak / 1e12, (left, right, low), x, y))
    for row, ours, theirs in points:
        parts.append(
            f'<g class="point"><path d="M{x(row.intensity):.1f} {y(_tflops(theirs)):.1f}'
            f'V{y(_tflops(ours)):.1f}"/>'
            f'<circle class="cublas" cx="{x(row.intensity):.1f}" cy="{y(_tflops(theirs)):.1f}" '
            f'r="4"/><circle class="cutlass" cx="{x(row.intensity):.1f}" '
            f'cy="{y(_tflops(ours)):.1f}" r="3.5"/>'
            + _title(
                f"{row.problem}: {row.intensity:.4g} FLOP/byte, CUTLASS {_tflops(ours):.4g}, "
                f"cuBLAS {_tflops(theirs):.4g} TFLOP/s"
            )
            + "</g>"
        )
    parts.append(_text(WIDTH / 2, height - 6, "FLOP per byte, operands moved once", "middle"))
    parts.append(_upright(height, "TFLOP/s"))
    return _svg(height, f"Roofline, {dtype}", parts)


def _roof(
    bandwidth: float, peak: float, edges: tuple[float, float, float], x: Scale, y: Scale
) -> str:
    """The slope up to the ridge and the flat roof, in TB/s, TFLOP/s and FLOP per byte."""
    left, right, low = edges
    ridge = peak / bandwidth
    start = max(left, low / bandwidth)
    return (
        f'<path class="roof" d="M{x(start):.1f} {y(start * bandwidth):.1f}'
        f'L{x(ridge):.1f} {y(peak):.1f}H{x(right):.1f}"/>'
        + _text(x(ridge), y(peak) - 6, f"{peak:.0f} TFLOP/s · {bandwidth:.2f} TB/s", "middle")
        + _text(x(ridge) + 4, y(low) - 6, f"ridge {ridge:.0f}", "start")
        + f'<path class="ridge" d="M{x(ridge):.1f} {y(peak):.1f}V{y(low):.1f}"/>'
    )


def classes(report: DeviceReport, dtype: DType) -> str:
    """A class a line: its geometric mean, and the span from its minimum to its maximum."""
    listed = [summary for summary in report.summaries if summary.dtype is dtype]
    if not listed:
        return ""
    height = _TOP + 28 * len(listed) + _BOTTOM
    low = max(_RATIO_FLOOR, min(0.9, *(s.minimum for s in listed)) * 0.98)
    top = min(_RATIO_TOP, max(1.1, *(s.maximum for s in listed)) * 1.02)
    x = _log_scale(low, top, 300, WIDTH - 120)
    parts = []
    for tick in _RATIO_TICKS:
        if low <= tick <= top:
            kind = "one" if tick == 1.0 else "grid"
            parts.append(
                f'<path class="{kind}" d="M{x(tick):.1f} {_TOP}V{height - _BOTTOM}"/>'
                + _text(x(tick), height - _BOTTOM + 16, f"{tick:g}", "middle")
            )
    for i, summary in enumerate(listed):
        parts.append(_class_line(summary, _TOP + 28 * i + 14, (low, top), x))
    return _svg(height, f"Geometric means by class, {dtype}", parts)


def _class_line(summary: Summary, at: float, edges: tuple[float, float], x: Scale) -> str:
    low, top = edges
    ends = [min(max(value, low), top) for value in (summary.minimum, summary.maximum)]
    mean = min(max(summary.geometric_mean, low), top)
    shape = "won" if summary.geometric_mean >= 1 else "behind"
    name = summary.title.partition(":")[0]
    return (
        f'<g class="{shape}"><path class="span" d="M{x(ends[0]):.1f} {at:.1f}H{x(ends[1]):.1f}"/>'
        + _mark(shape, x(mean), at, 5)
        + _text(290, at + 4, f"{name} ({summary.problems})", "end")
        + _text(WIDTH - 110, at + 4, f"{summary.geometric_mean:.3f}", "start")
        + _title(
            f"{summary.title}: geometric mean {summary.geometric_mean:.3f}, "
            f"{summary.minimum:.3f} to {summary.maximum:.3f}"
        )
        + "</g>"
    )


def _tflops(side: Side) -> float:
    return side.flops_per_second / 1e12


def _mark(shape: str, x: float, y: float, size: float = 3) -> str:
    """A disc above 1, a triangle below, a ring for a tie."""
    if shape == "behind":
        a = size * 1.2
        return (
            f'<path class="mark" d="M{x - a:.1f} {y - a:.1f}h{2 * a:.1f}l{-a:.1f} {2 * a:.1f}z"/>'
        )
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"/>'


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _log_scale(low: float, high: float, start: float, end: float) -> Scale:
    inner = _linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(value))


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade in between."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]


def _grid_line(y: float, label: str, *, strong: bool = False) -> str:
    kind = "one" if strong else "grid"
    line = f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
    return line + _text(_LEFT - 6, y + 4, label, "end")


def _grid_column(x: float, label: str, height: int) -> str:
    line = f'<path class="grid" d="M{x:.1f} {_TOP}V{height - _BOTTOM}"/>'
    return line + _text(x, height - _BOTTOM + 15, label, "middle")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(height: int, text: str) -> str:
    at = (height - _BOTTOM + _TOP) / 2
    return (
        f'<text transform="translate(14 {at:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )
