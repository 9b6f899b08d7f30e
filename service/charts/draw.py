"""The parts of charts: scales, axes, marks, text, and the picture around them.

A chart is `WIDTH` units wide, and a page scales it. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from markupsafe import Markup

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
"""Margins around the plot; labels are drawn in them."""

STYLE = Path(__file__).parent.parent / "pages" / "static" / "charts.css"

_TICK_WIDTH, _TICK_HEIGHT = 80, 30
"""Room that the label of a tick takes along a horizontal and along a vertical axis."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps low … high to start … end. A value outside is drawn at the nearer end.

    Both ends of a logarithmic scale must be above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            share = math.log(value / low) / (math.log(high / low) or 1.0)
        else:
            share = (value - low) / (high - low or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, room: float) -> list[float]:
        """Return round values whose labels fit, if each label takes `room`.

        On a logarithmic scale these are 1, 2 and 5 times each power of ten. On a linear scale, or
        if a logarithmic one has fewer than three of them, they are multiples of 1, 2 or 5 times one
        power of ten.
        """
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            decades = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            ticks = [tick for tick in decades if self.low <= tick <= self.high]
            if len(ticks) >= 3:
                return ticks
        least = (self.high - self.low) * room / abs(self.end - self.start)
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        return [i * step for i in range(math.ceil(self.low / step), int(self.high // step) + 1)]


def horizontal_axis(x: Scale, y: Scale, name: str) -> str:
    """Draw a vertical grid line for each tick of `x`, its value below, and the axis's name."""
    top, bottom = sorted((y.start, y.end))
    parts = [
        path("grid", "M", x(tick), bottom, "V", top) + text(x(tick), bottom + 15, f"{tick:g}")
        for tick in x.ticks(_TICK_WIDTH)
    ]
    return "".join(parts) + text((x.start + x.end) / 2, bottom + 34, name)


def vertical_axis(x: Scale, y: Scale, name: str) -> str:
    """Draw a horizontal grid line for each tick of `y`, its value at the left, and the name."""
    parts = [
        path("grid", "M", x.start, y(tick), "H", x.end)
        + text(x.start - 6, y(tick) + 4, f"{tick:g}", "end")
        for tick in y.ticks(_TICK_HEIGHT)
    ]
    return "".join(parts) + upright(x.start - 50, (y.start + y.end) / 2, name)


def path(kind: str, *commands: str | float) -> str:
    """Draw a path of SVG commands and coordinates; an empty `kind` means no class of its own."""
    attribute = f'class="{kind}" ' if kind else ""
    drawn = "".join(part if isinstance(part, str) else f"{part:.1f} " for part in commands)
    return f'<path {attribute}d="{drawn.rstrip()}"/>'


def mark(kind: str, x: float, y: float) -> str:
    """Draw a triangle for `behind`, else a circle, which the stylesheet fills for `won` only."""
    if kind == "behind":
        return path("mark", "M", x - 3.6, y - 3.6, "h7.2l-3.6 7.2z")
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def upright(x: float, y: float, words: str) -> str:
    turn = f"translate({x:.1f} {y:.1f}) rotate(-90)"
    return f'<text transform="{turn}" text-anchor="middle">{escape(words)}</text>'


def title(words: str) -> str:
    """The tooltip of the element around it."""
    return f"<title>{escape(words)}</title>"


def group(kind: str, tooltip: str, *parts: str) -> str:
    return f'<g class="{kind}">{"".join(parts)}{title(tooltip)}</g>'


def legend(x: float, entries: Sequence[tuple[str, str]]) -> str:
    """Name lines, below each other from the top; an entry is a line's class and its name."""
    return "".join(
        path(kind, "M", x, TOP + 14 + 18 * i, "h28")
        + text(x + 36, TOP + 18 + 18 * i, name, "start")
        for i, (kind, name) in enumerate(entries)
    )


def svg(height: float, label: str, *parts: str, links: bool = False) -> Markup:
    """Join the parts into a picture with `label` for screen readers.

    A picture with links has the role of a group, because screen readers skip the inside of images.
    """
    role = "group" if links else "img"
    return Markup(  # noqa: S704 - text and attributes were escaped above
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="{role}" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
