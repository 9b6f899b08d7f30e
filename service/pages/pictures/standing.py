"""All winners of a device model under its roofs: TFLOP/s over FLOP per byte, both logarithmic.

What is drawn is what is served. A disc is ahead of the default; a ring is the default, which stays.
Roofs are named by the element types that they bound, the highest first.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.report.axes import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    decades,
    grid_column,
    grid_line,
    log_scale,
    svg,
    text,
    title,
    upright,
)
from service.report.roofline import Roof, roof_line
from tuner.store.listing import Listed

HEIGHT = 420


def standing(listed: Sequence[Listed], roofs: Sequence[tuple[str, Roof]]) -> str:
    """The picture; empty where nothing has a time."""
    points = [(item, us) for item in listed if (us := served_us(item))]
    if not points:
        return ""
    rates = [item.problem.flops / us / 1e6 for item, us in points]
    places = [item.problem.flops / item.problem.operand_bytes for item, _ in points]
    top = max([*rates, *(roof.peak / 1e12 for _, roof in roofs)]) * 1.6
    right = max([*places, *(roof.ridge for _, roof in roofs)]) * 1.6
    low, left = min(rates) / 1.5, min(places) / 1.5
    x = log_scale(left, right, LEFT, WIDTH - RIGHT)
    y = log_scale(low, top, HEIGHT - BOTTOM, TOP)
    parts = [grid_line(y(tick), f"{tick:g}") for tick in decades(low, top)]
    parts += [grid_column(x(tick), f"{tick:g}", HEIGHT) for tick in decades(left, right)]
    for row, (name, roof) in enumerate(roofs):
        at = TOP + 14 + 18 * row  # named where no product is: few bytes, many FLOP per second
        parts.append(
            roof_line(roof, (left, right, low), x, y)
            + f'<path class="{roof.kind}" d="M{LEFT + 12} {at}h28"/>'
            + text(LEFT + 48, at + 4, name, "start")
        )
    for (item, us), rate, place in zip(points, rates, places, strict=True):
        kind = "tie" if item.use.is_default else "won"
        said = f"{item.problem}: {us:.2f} µs, {rate:.4g} TFLOP/s at {place:.3g} FLOP/byte"
        parts.append(
            f'<g class="{kind}"><circle class="mark" cx="{x(place):.1f}" cy="{y(rate):.1f}" '
            f'r="3"/>{title(said)}</g>'
        )
    parts.append(text(WIDTH / 2, HEIGHT - 6, "FLOP per byte, operands moved once", "middle"))
    parts.append(upright(HEIGHT, "TFLOP/s"))
    return svg(HEIGHT, f"Roofline of {len(points)} winners", parts)


def served_us(item: Listed) -> float | None:
    """Microseconds of what callers are told to run; None where that was not measured."""
    return item.baseline_us if item.use.is_default else item.median_us
