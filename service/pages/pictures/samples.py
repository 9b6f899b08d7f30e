"""How samples are distributed: one line per candidate, one point per sample.

The points of a line lie beside each other as far as they would cover each other. A bar under them
is the 95% interval of the median, the long stroke the median. What has no samples on record has
the bar and the stroke alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmsmith.answers.answer import Statistics
from service.report.axes import (
    BOTTOM,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    grid_column,
    linear,
    steps,
    svg,
    text,
    title,
)

_LINE = 44
_NAMES = 250
"""Room for the names on the left."""
_POINT = 2.4
_SHARE = 0.9
"""Of a line's height that its points may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What one line shows. `kind` is a class of the stylesheet: won, tie, behind.

    Attributes:
        samples_us: times per launch in microseconds; empty where the record has none.
    """

    name: str
    about: str = ""
    kind: str
    statistics: Statistics
    samples_us: Sequence[float] = ()


def samples(lines: Sequence[Line]) -> str:
    """The picture; empty for no lines."""
    if not lines:
        return ""
    height = TOP + _LINE * len(lines) + BOTTOM
    every = [us for line in lines for us in (*line.samples_us, *_interval(line))]
    margin = 0.04 * (max(every) - min(every)) or 0.01 * max(every)
    low, high = min(every) - margin, max(every) + margin
    x = linear(low, high, _NAMES, WIDTH - RIGHT)
    parts = [grid_column(x(tick), f"{tick:g}", height) for tick in steps(low, high)]
    parts += [_line(line, TOP + _LINE * (i + 0.5), x) for i, line in enumerate(lines)]
    parts.append(text((_NAMES + WIDTH) / 2, height - 6, "µs per launch", "middle"))
    return svg(height, "Times per launch", parts)


def _interval(line: Line) -> tuple[float, float]:
    return line.statistics.ci_low_us, line.statistics.ci_high_us


def _line(line: Line, y: float, x: Scale) -> str:
    low, high = _interval(line)
    median = line.statistics.median_us
    points = "".join(
        f'<circle class="mark" cx="{at:.1f}" cy="{y + offset:.1f}" r="{_POINT}"/>'
        for at, offset in _beside([x(us) for us in sorted(line.samples_us)])
    )
    counted = f", {len(line.samples_us)} samples" if line.samples_us else ", samples not kept"
    return (
        f'<g class="{line.kind}"><path class="interval" d="M{x(low):.1f} {y:.1f}H{x(high):.1f}"/>'
        f'{points}<path class="median" d="M{x(median):.1f} {y - 15:.1f}v30"/>'
        + text(_NAMES - 10, y + (-3 if line.about else 4), line.name, "end")
        + (text(_NAMES - 10, y + 12, line.about, "end") if line.about else "")
        + title(f"{line.name} {line.about}: {median:.2f} µs ({low:.2f} to {high:.2f}){counted}")
        + "</g>"
    )


def _beside(places: Sequence[float]) -> list[tuple[float, float]]:
    """Each place (ascending) with an offset at which its point covers none of those before."""
    found: list[tuple[float, float]] = []
    lanes: dict[int, float] = {}  # the last place in each lane
    most = int(_LINE * _SHARE / (4 * _POINT))
    order = sorted(range(-most, most + 1), key=lambda lane: (abs(lane), lane))
    for place in places:
        free = (lane for lane in order if place - lanes.get(lane, -1e9) >= 2 * _POINT)
        lane = next(free, 0)
        lanes[lane] = place
        found.append((place, lane * 2 * _POINT))
    return found
