"""The picture of `gemmsmith eval`: regret against the number of trials, as a standalone SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.search.evaluation import Curve

WIDTH, HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 220, 34, 44
_FLOOR, _CEILING = 0.001, 2.0
"""Regrets beyond are drawn at the edge: a logarithmic axis has no zero."""
_TICKS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_INK = ("#1f6feb", "#d1570a", "#2da44e", "#8250df", "#bf3989", "#6e7781")
_STYLE = (
    "<style>text{font:13px system-ui,sans-serif;fill:#57606a}"
    ".grid{stroke:#d0d7de}.line{fill:none;stroke-width:2}.worst{stroke-dasharray:6 4}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#3d444d}}</style>"
)


def picture(curves: Sequence[Curve]) -> str:
    """Two lines a strategy: the median of all problems, and dashed their worst."""
    counts = curves[0].counts
    parts = [_STYLE]
    for tick in _TICKS:
        parts.append(f'<path class="grid" d="M{_LEFT} {_y(tick):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, _y(tick) + 4, f"{100 * tick:g}%", "end"))
    for count in counts:
        parts.append(_text(_x(count, counts), HEIGHT - _BOTTOM + 18, str(count), "middle"))
    for i, curve in enumerate(curves):
        ink = _INK[i % len(_INK)]
        for kind, row in (("median", curve.medians), ("worst", curve.worst)):
            points = " ".join(
                f"{_x(count, counts):.1f},{_y(regret):.1f}"
                for count, regret in zip(counts, row, strict=True)
            )
            said = ", ".join(
                f"{100 * regret:.2f}% after {count}"
                for count, regret in zip(counts, row, strict=True)
            )
            parts.append(
                f'<polyline class="line {kind}" stroke="{ink}" points="{points}">'
                f"<title>{escape(f'{curve.name}, {kind}: {said}')}</title></polyline>"
            )
        at = _TOP + 12 + 22 * i
        parts.append(
            f'<path class="line" stroke="{ink}" d="M{WIDTH - _RIGHT + 16} {at - 4}h24"/>'
            + _text(WIDTH - _RIGHT + 48, at, curve.name, "start")
        )
    parts.append(_text(_LEFT, 18, "Regret of the winner found: median, and worst dashed", "start"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, "trials", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Regret against the number of trials">{"".join(parts)}</svg>\n'
    )


def _x(count: int, counts: Sequence[int]) -> float:
    span = math.log(max(counts) / min(counts)) or 1.0
    return _LEFT + 12 + math.log(count / min(counts)) / span * (WIDTH - _RIGHT - _LEFT - 24)


def _y(regret: float) -> float:
    share = math.log(min(max(regret, _FLOOR), _CEILING) / _FLOOR) / math.log(_CEILING / _FLOOR)
    return HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
