"""Rooflines: TFLOP/s over FLOP per byte, both logarithmic, below the limits of the GPU.

A measured roof is a solid line, a nominal one is dashed. The legend is at the upper left, where no
product can be: few FLOP per byte and many FLOP per second.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from service.charts import draw
from service.report.problem_rows import ReportRow, Side
from service.report.roofs import Roof
from tuner.store.listing import Listed
from tuner.workloads.footprint import least_bytes

HEIGHT = 420
_MARGIN = 1.6
"""The axes extend beyond the drawn values by this factor."""

Named = tuple[str, Roof]


def of_rows(rows: Sequence[ReportRow], dtype: str, roofs: Sequence[Roof]) -> Markup:
    """Draw CUTLASS and cuBLAS of each row, joined by a line; empty if no row has both times."""
    pairs = [(row, row.cutlass, row.cublas) for row in rows if row.cutlass and row.cublas]
    if not pairs:
        return Markup("")
    rates = [_tflops(side) for _, ours, theirs in pairs for side in (ours, theirs)]
    named = []
    for roof in roofs:
        limits = f"{roof.peak / 1e12:.0f} TFLOP/s · {roof.bandwidth / 1e12:.2f} TB/s"
        named.append((f"{roof.source}: {limits}", roof))
    x, y = _scales([row.intensity for row, *_ in pairs], rates, named)
    parts = [_under(named, x, y)]
    for roof in roofs:
        if roof.measured:
            ridge = x(roof.ridge)
            parts.append(draw.path("ridge", "M", ridge, y(roof.peak / 1e12), "V", y.start))
            parts.append(draw.text(ridge + 4, y.start - 6, f"ridge {roof.ridge:.0f}", "start"))
    for row, cutlass, cublas in pairs:
        our_rate, their_rate = _tflops(cutlass), _tflops(cublas)
        at = x(row.intensity)
        parts.append(
            draw.group(
                "point",
                f"{row.problem}: {row.intensity:.4g} FLOP/byte, CUTLASS {our_rate:.4g}, "
                f"cuBLAS {their_rate:.4g} TFLOP/s",
                draw.path("", "M", at, y(their_rate), "V", y(our_rate)),
                f'<circle class="cublas" cx="{at:.1f}" cy="{y(their_rate):.1f}" r="4"/>',
                f'<circle class="cutlass" cx="{at:.1f}" cy="{y(our_rate):.1f}" r="3.5"/>',
            )
        )
    return draw.svg(HEIGHT, f"Roofline, {dtype}", *parts)


def of_winners(listed: Sequence[Listed], roofs: Sequence[Named]) -> Markup:
    """Draw what is served, below roofs named by the element types that they bound.

    A disc is a kernel faster than the default, a ring is the default. Empty without times.
    """
    points = [
        (item, us)
        for item in listed
        if (us := item.baseline_us if item.use.is_default else item.median_us)
    ]
    if not points:
        return Markup("")
    rates = [item.problem.flops / us / 1e6 for item, us in points]
    intensities = [item.problem.flops / least_bytes(item.problem) for item, _ in points]
    x, y = _scales(intensities, rates, roofs)
    parts = [_under(roofs, x, y)]
    for (item, us), rate, intensity in zip(points, rates, intensities, strict=True):
        kind = "tie" if item.use.is_default else "won"
        tooltip = f"{item.problem}: {us:.2f} µs, {rate:.4g} TFLOP/s at {intensity:.3g} FLOP/byte"
        parts.append(draw.group(kind, tooltip, draw.mark(kind, x(intensity), y(rate))))
    return draw.svg(HEIGHT, f"Roofline of {len(points)} winners", *parts)


def _tflops(side: Side) -> float:
    return side.flops_per_second / 1e12


def _scales(
    intensities: Sequence[float], rates: Sequence[float], roofs: Sequence[Named]
) -> tuple[draw.Scale, draw.Scale]:
    xs = [*intensities, *(roof.ridge for _, roof in roofs)]
    ys = [*rates, *(roof.peak / 1e12 for _, roof in roofs)]
    left, right = min(xs) / _MARGIN, max(xs) * _MARGIN
    low, high = min(ys) / _MARGIN, max(ys) * _MARGIN
    return (
        draw.Scale(left, right, draw.LEFT, draw.WIDTH - draw.RIGHT, log=True),
        draw.Scale(low, high, HEIGHT - draw.BOTTOM, draw.TOP, log=True),
    )


def _under(roofs: Sequence[Named], x: draw.Scale, y: draw.Scale) -> str:
    """Draw the axes, the roofs and their names."""
    parts = [
        draw.horizontal_axis(x, y, "FLOP per byte, operands moved once"),
        draw.vertical_axis(x, y, "TFLOP/s"),
        draw.legend(draw.LEFT + 12, [(roof.kind, name) for name, roof in roofs]),
    ]
    for _, roof in roofs:
        bandwidth, peak = roof.bandwidth / 1e12, roof.peak / 1e12
        begin = max(x.low, y.low / bandwidth)  # the slope may leave the chart below its left edge
        slope = ("M", x(begin), y(begin * bandwidth), "L", x(roof.ridge), y(peak))
        parts.append(draw.path(roof.kind, *slope, "H", x.end))
    return "".join(parts)
