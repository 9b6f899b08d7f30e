"""Rows of intervals: times with their samples, and ratios in each regime.

A row has a name at the left, a bar for its interval, a vertical stroke for its middle, a point for
each sample, and a value at the right if it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gemmsmith.answers.answer import InRegime, Ratio, Statistics
from service.charts import draw

_NAMES, _VALUES = 250, 170
"""Room for the names at the left, and for the values at the right."""
_ROW, _TALL_ROW = 32, 44
_POINT = 2.4
_SHARE = 0.9
"""Share of a row's height that its points may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A row of a chart.

    Attributes:
        about: a second line under the name.
        kind: a class of the stylesheet: won, tie or behind.
        low, middle, high: the interval and its median or mean.
        points: samples.
        value: a text at the right.
    """

    name: str
    about: str = ""
    kind: str
    low: float
    middle: float
    high: float
    points: Sequence[float] = ()
    value: str = ""
    tooltip: str


Guide = tuple[float, str, str]
"""A vertical line: its value, its class and its name."""


def chart(
    rows: Sequence[Interval],
    label: str,
    axis: str,
    guides: Sequence[Guide] = (),
    edges: tuple[float, float] | None = None,
) -> Markup:
    """Draw the rows below each other; with `edges`, on a logarithmic axis from one to the other."""
    if not rows:
        return Markup("")
    tall = any(row.about or row.points for row in rows)
    high = _TALL_ROW if tall else _ROW
    top = draw.TOP + 18 * bool(guides)
    bottom = top + high * len(rows)
    low, most = edges or _edges(rows, guides)
    room = _VALUES if any(row.value for row in rows) else 0
    x = draw.Scale(low, most, _NAMES, draw.WIDTH - draw.RIGHT - room, log=edges is not None)
    parts = [draw.horizontal_axis(x, draw.Scale(0, 1, top, bottom), axis)]
    for value, kind, name in guides:
        parts.append(
            draw.path(kind, "M", x(value), top - 2, "V", bottom)
            + draw.text(x(value), top - 8, name)
        )
    parts += [_row(row, x, top + high * (i + 0.5), high) for i, row in enumerate(rows)]
    return draw.svg(bottom + draw.BOTTOM, label, *parts)


def _edges(rows: Iterable[Interval], guides: Iterable[Guide]) -> tuple[float, float]:
    shown = [value for row in rows for value in (row.low, row.high, *row.points)]
    shown += [value for value, *_ in guides]
    margin = 0.05 * (max(shown) - min(shown)) or 0.01 * max(shown)
    return min(shown) - margin, max(shown) + margin


def _row(row: Interval, x: draw.Scale, y: float, high: float) -> str:
    points = "".join(
        f'<circle class="mark" cx="{at:.1f}" cy="{y + offset:.1f}" r="{_POINT}"/>'
        for at, offset in _beside([x(value) for value in sorted(row.points)])
    )
    reach = high / 3
    return draw.group(
        row.kind,
        row.tooltip,
        draw.path("interval", "M", x(row.low), y, "H", x(row.high)),
        points,
        draw.path("median", "M", x(row.middle), y - reach, "v", 2 * reach),
        draw.text(_NAMES - 10, y + (-3 if row.about else 4), row.name, "end"),
        draw.text(_NAMES - 10, y + 12, row.about, "end") if row.about else "",
        draw.text(draw.WIDTH - draw.RIGHT, y + 4, row.value, "end") if row.value else "",
    )


def _beside(places: Sequence[float]) -> list[tuple[float, float]]:
    """Give each place (ascending) a vertical offset at which its point covers no earlier one."""
    # Points are put into lanes above and below the middle: the nearest lane whose last point is far
    # enough to the left, else the middle.
    points: list[tuple[float, float]] = []
    lanes: dict[int, float] = {}  # the last place in each lane
    most = int(_TALL_ROW * _SHARE / (4 * _POINT))
    order = sorted(range(-most, most + 1), key=lambda lane: (abs(lane), lane))
    for place in places:
        free = (lane for lane in order if place - lanes.get(lane, -1e9) >= 2 * _POINT)
        lane = next(free, 0)
        lanes[lane] = place
        points.append((place, lane * 2 * _POINT))
    return points


def timed(
    name: str, about: str, kind: str, time: Statistics, samples_us: Sequence[float] = ()
) -> Interval:
    """Make the row of a measured time, with its samples if they were kept."""
    counted = f", {len(samples_us)} samples" if samples_us else ", samples not kept"
    interval = f"{time.median_us:.2f} µs ({time.ci_low_us:.2f} to {time.ci_high_us:.2f})"
    return Interval(
        name=name,
        about=about,
        kind=kind,
        low=time.ci_low_us,
        middle=time.median_us,
        high=time.ci_high_us,
        points=samples_us,
        tooltip=f"{name} {about}: {interval}{counted}",
    )


def times(rows: Sequence[Interval]) -> Markup:
    return chart(rows, "Times per launch", "µs per launch")


def kind_of(ratio: Ratio) -> str:
    """Return the class of a ratio: a tie if its interval includes 1."""
    return "won" if ratio.ci_low > 1 else "behind" if ratio.ci_high < 1 else "tie"


def _compared(name: str, ratio: Ratio, value: str) -> Interval:
    interval = f"{ratio.median:.3f} ({ratio.ci_low:.3f} to {ratio.ci_high:.3f})"
    return Interval(
        name=name,
        kind=kind_of(ratio),
        low=ratio.ci_low,
        middle=ratio.median,
        high=ratio.ci_high,
        value=value,
        tooltip=f"{name}: {interval}; {value}",
    )


def regimes(
    measured: Sequence[InRegime], power_penalty: float | None, mean: float | None, default: str
) -> Markup:
    """Draw the ratio to the default in each regime, with its 95% interval.

    The solid line is the default. The dashed line is the power penalty, which the geometric mean of
    the regimes must exceed; it is drawn if it is above 1.
    """
    rows = []
    for regime in measured:
        if regime.speedup:
            against = f" against {regime.default_us:.2f}" if regime.default_us is not None else ""
            times = f"{regime.median_us:.2f} µs{against}"
            rows.append(_compared(regime.regime.value, regime.speedup, times))
    if mean is not None and len(rows) > 1:
        point = Ratio(median=mean, ci_low=mean, ci_high=mean)
        rows.append(_compared("geometric mean", point, f"{mean:.3f}"))
    guides = [(1.0, "unity", default)]
    if power_penalty is not None and power_penalty > 1:
        guides.append((power_penalty, "ridge", f"penalty {power_penalty:.3f}"))
    axis = f"time of {default} / time of the candidate"
    return chart(rows, "Ratio to the default in each regime", axis, guides)
