"""Rooflines: TFLOP/s over FLOP per byte, both logarithmic, under what the GPU can do.

A measured roof is a solid line, a nominal one is dashed. Roofs are named at the upper left, where
no product lies: few bytes and many FLOP per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from service.charts import draw
from service.report.problem_rows import ReportRow, Side
from service.report.roofs import Roof
from tuner.store.listing import Listed

HEIGHT = 420
_MARGIN = 1.6
"""By how many times the axes exceed what is drawn."""

Named = tuple[str, Roof]


def of_rows(rows: Sequence[ReportRow], dtype: str, roofs: Sequence[Roof]) -> Markup:
    """CUTLASS and cuBLAS of each row, joined; empty if no row has both times."""
    pairs = [(row, row.cutlass, row.cublas) for row in rows if row.cutlass and row.cublas]
    if not pairs:
        return Markup("")
    rates = [_tflops(side) for _, ours, theirs in pairs for side in (ours, theirs)]
    named = [
        (
            f"{'measured' if roof.measured else 'nominal'}: {roof.peak / 1e12:.0f} TFLOP/s · "
            f"{roof.bandwidth / 1e12:.2f} TB/s",
            roof,
        )
        for roof in roofs
    ]
    x, y = _scales([row.intensity for row, *_ in pairs], rates, named)
    parts = [_under(named, x, y)]
    for roof in roofs:
        if roof.measured:
            at = x(roof.ridge)
            parts.append(draw.path("ridge", "M", at, y(roof.peak / 1e12), "V", y.start))
            parts.append(draw.text(at + 4, y.start - 6, f"ridge {roof.ridge:.0f}", "start"))
    for row, ours, theirs in pairs:
        here, there = _tflops(ours), _tflops(theirs)
        at = x(row.intensity)
        parts.append(
            draw.group(
                "point",
                f"{row.problem}: {row.intensity:.4g} FLOP/byte, CUTLASS {here:.4g}, "
                f"cuBLAS {there:.4g} TFLOP/s",
                draw.path("", "M", at, y(there), "V", y(here)),
                f'<circle class="cublas" cx="{at:.1f}" cy="{y(there):.1f}" r="4"/>',
                f'<circle class="cutlass" cx="{at:.1f}" cy="{y(here):.1f}" r="3.5"/>',
            )
        )
    return draw.svg(HEIGHT, f"Roofline, {dtype}", *parts)


def of_winners(listed: Sequence[Listed], roofs: Sequence[Named]) -> Markup:
    """What is served, under roofs named by the element types that they bound.

    A disc is ahead of the default; a ring is the default, which stays. Empty without times.
    """
    points = [(item, us) for item in listed if (us := _served_us(item))]
    if not points:
        return Markup("")
    rates = [item.problem.flops / us / 1e6 for item, us in points]
    places = [item.problem.flops / item.problem.operand_bytes for item, _ in points]
    x, y = _scales(places, rates, roofs)
    parts = [_under(roofs, x, y)]
    for (item, us), rate, place in zip(points, rates, places, strict=True):
        kind = "tie" if item.use.is_default else "won"
        words = f"{item.problem}: {us:.2f} µs, {rate:.4g} TFLOP/s at {place:.3g} FLOP/byte"
        parts.append(draw.group(kind, words, draw.mark(kind, x(place), y(rate))))
    return draw.svg(HEIGHT, f"Roofline of {len(points)} winners", *parts)


def _served_us(item: Listed) -> float | None:
    return item.baseline_us if item.use.is_default else item.median_us


def _tflops(side: Side) -> float:
    return side.flops_per_second / 1e12


def _scales(
    places: Sequence[float], rates: Sequence[float], roofs: Sequence[Named]
) -> tuple[draw.Scale, draw.Scale]:
    across = [*places, *(roof.ridge for _, roof in roofs)]
    upward = [*rates, *(roof.peak / 1e12 for _, roof in roofs)]
    left, right = min(across) / _MARGIN, max(across) * _MARGIN
    low, high = min(upward) / _MARGIN, max(upward) * _MARGIN
    return (
        draw.Scale(left, right, draw.LEFT, draw.WIDTH - draw.RIGHT, log=True),
        draw.Scale(low, high, HEIGHT - draw.BOTTOM, draw.TOP, log=True),
    )


def _under(roofs: Sequence[Named], x: draw.Scale, y: draw.Scale) -> str:
    """The axes, the roofs and their names."""
    parts = [
        draw.horizontal_axis(x, y, "FLOP per byte, operands moved once"),
        draw.vertical_axis(x, y, "TFLOP/s"),
        draw.legend(draw.LEFT + 12, [(roof.kind, name) for name, roof in roofs]),
    ]
    for _, roof in roofs:
        bandwidth, peak = roof.bandwidth / 1e12, roof.peak / 1e12
        begin = max(x.low, y.low / bandwidth)  # the slope may cross the lower edge first
        slope = ("M", x(begin), y(begin * bandwidth), "L", x(roof.ridge), y(peak))
        parts.append(draw.path(roof.kind, *slope, "H", x.end))
    return "".join(parts)
