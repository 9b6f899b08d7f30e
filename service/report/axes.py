"""What every picture is drawn with: scales, ticks, grids, marks and text.

A picture is `WIDTH` units wide and as high as it says; a page scales it. Functions give SVG with
all text escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 40
"""Margins around what is plotted; labels stand in them."""

Scale = Callable[[float], float]


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low … high to start … end."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def log_scale(low: float, high: float, start: float, end: float) -> Scale:
    """As `linear`, of logarithms: both ends must be above 0."""
    inner = linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(value))


def decades(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2 and 5 of every decade in between."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]


def steps(low: float, high: float, count: int = 8) -> list[float]:
    """Ticks of a linear axis: multiples of 1, 2 or 5 of a power of ten, at most `count` or so."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def grid_line(y: float, label: str, *, strong: bool = False) -> str:
    """A horizontal line with its label in the left margin."""
    kind = "one" if strong else "grid"
    line = f'<path class="{kind}" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    return line + text(LEFT - 6, y + 4, label, "end")


def grid_column(x: float, label: str, height: int, *, strong: bool = False) -> str:
    """A vertical line with its label under it."""
    kind = "one" if strong else "grid"
    line = f'<path class="{kind}" d="M{x:.1f} {TOP}V{height - BOTTOM}"/>'
    return line + text(x, height - BOTTOM + 15, label, "middle")


def mark(shape: str, x: float, y: float, size: float = 3) -> str:
    """A triangle for `behind`; for other shapes a circle, which the stylesheet fills or not."""
    if shape == "behind":
        a = size * 1.2
        return (
            f'<path class="mark" d="M{x - a:.1f} {y - a:.1f}h{2 * a:.1f}l{-a:.1f} {2 * a:.1f}z"/>'
        )
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"/>'


def text(x: float, y: float, words: str, anchor: str) -> str:
    """A line of text; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def upright(height: int, words: str) -> str:
    """The vertical axis's name, along the left edge."""
    at = (height - BOTTOM + TOP) / 2
    return (
        f'<text transform="translate(14 {at:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(words)}</text>"
    )


def title(words: str) -> str:
    """What is shown when the element around it is pointed at."""
    return f"<title>{escape(words)}</title>"


def svg(height: int, label: str, parts: Sequence[str], *, links: bool = False) -> str:
    """The picture; `label` is what a screen reader says of it.

    With `links` in it, it is a group: of an image nobody expects, or is told, what is inside.
    """
    role = "group" if links else "img"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="{role}" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )
