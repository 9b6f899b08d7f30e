"""The chart of `gemmsmith eval`: regret against the number of trials, as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.charts import draw

if TYPE_CHECKING:
    from tuner.search.evaluation import Curve

HEIGHT = 420
_NAMES = 220
"""Width of the names of strategies at the right."""
_LOWEST, _HIGHEST = 0.1, 200.0
"""Regrets outside, in percent, are drawn at the edge: a logarithmic axis has no zero."""


def chart(curves: Sequence[Curve]) -> str:
    """Draw two lines for each strategy: the median of all problems, and dashed the worst."""
    counts = curves[0].counts
    bottom = HEIGHT - draw.BOTTOM
    x = draw.Scale(min(counts), max(counts), draw.LEFT + 12, draw.WIDTH - _NAMES - 12, log=True)
    y = draw.Scale(_LOWEST, _HIGHEST, bottom, draw.TOP + 20, log=True)
    parts = [
        f"<style>{draw.STYLE.read_text(encoding='utf-8')}</style>",
        draw.text(draw.LEFT, 18, "Regret of the winner: median, and worst dashed", "start"),
        draw.vertical_axis(draw.Scale(0, 1, draw.LEFT, draw.WIDTH - _NAMES), y, "regret, %"),
        *(draw.text(x(count), bottom + 15, str(count)) for count in counts),
        draw.text((x.start + x.end) / 2, bottom + 34, "trials"),
        draw.legend(
            draw.WIDTH - _NAMES + 16, [(f"line s{i}", curve.name) for i, curve in enumerate(curves)]
        ),
    ]
    for i, curve in enumerate(curves):
        for name, regrets in (("median", curve.medians), ("worst", curve.worst)):
            steps = [(n, 100 * regret) for n, regret in zip(counts, regrets, strict=True)]
            points = " ".join(f"{x(count):.1f},{y(percent):.1f}" for count, percent in steps)
            words = ", ".join(f"{percent:.2f}% after {count}" for count, percent in steps)
            parts.append(
                f'<polyline class="line s{i} {name}" points="{points}">'
                + draw.title(f"{curve.name}, {name}: {words}")
                + "</polyline>"
            )
    return draw.svg(HEIGHT, "Regret against the number of trials", *parts) + "\n"
