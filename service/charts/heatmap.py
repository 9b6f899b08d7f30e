"""A heat map of ratios over M and N: a cell for each problem, with its ratio written in it.

A cell's colour says what is served: the class `stays` if the default is kept, else one of the
stylesheet's classes `r0` … `r5`, from slightly to much faster. A ratio has the same colour on every
map. Cells are links. Extents are sorted and evenly spaced, because measured sizes are not a regular
grid.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

from gemmsmith.core.problem import Problem
from service.charts import draw
from tuner.store.listing import Listed

EDGES = (1.02, 1.05, 1.1, 1.25, 2.0)
"""Ratios at which the colour changes."""

STAYS = "="
"""The text of a cell if the default stays."""

_LEFT, _RIGHT, _UNDER, _LEGEND = 84, 8, 62, 34
_HIGHEST = 40
_SWATCH = 64
_LABEL = 44
"""Width of a column's label."""


def heatmap(listed: Sequence[Listed], href: Callable[[Problem], str]) -> Markup:
    """Draw a cell for each winner, which links to `href` of its problem, and a legend.

    Empty without winners.
    """
    if not listed:
        return Markup("")
    rows = sorted({item.problem.m for item in listed}, reverse=True)
    columns = sorted({item.problem.n for item in listed})
    top = _LEGEND + draw.TOP
    bottom = top + min(_HIGHEST, max(18, 640 / len(rows))) * len(rows)
    x = draw.Scale(0, len(columns), _LEFT, draw.WIDTH - _RIGHT)
    y = draw.Scale(0, len(rows), top, bottom)
    size = x(1) - x(0), y(1) - y(0)
    apart = -(-_LABEL * len(columns) // (draw.WIDTH - _LEFT))  # label every `apart`th column
    row_of = {m: i for i, m in enumerate(rows)}
    column_of = {n: i for i, n in enumerate(columns)}
    return draw.svg(
        round(bottom + _UNDER),
        "What is served over M and N",
        _legend(),
        *(draw.text(_LEFT - 6, y(i + 0.5) + 4, str(m), "end") for m, i in row_of.items()),
        *(
            draw.text(x(i + 0.5), bottom + 16, str(n))
            for n, i in column_of.items()
            if i % apart == 0
        ),
        *(
            _cell(item, href, (x(column_of[item.problem.n]), y(row_of[item.problem.m])), size)
            for item in listed
        ),
        draw.text((x.start + x.end) / 2, bottom + 40, "N"),
        draw.upright(14, (top + bottom) / 2, "M"),
        links=True,
    )


def _cell(
    item: Listed,
    href: Callable[[Problem], str],
    corner: tuple[float, float],
    size: tuple[float, float],
) -> str:
    (x, y), (wide, high) = corner, size
    median, stays = item.speedup.median if item.speedup else None, item.use.is_default
    colour = "stays" if stays or median is None else f"r{bisect(EDGES, median)}"
    best = "not paired" if median is None else f"{median:.3f}"
    ratio = STAYS if stays else "–" if median is None else f"{median:.2f}"
    served = f"the default stays, best candidate {best}" if stays else best
    return (
        f'<a href="{escape(href(item.problem))}" class="cell {colour}">'
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}" '
        f'rx="3"/>{draw.text(x + wide / 2, y + high / 2 + 4, ratio) if wide >= 30 else ""}'
        f"{draw.title(f'{item.problem}: {served}')}</a>"
    )


def _legend() -> str:
    """Draw a swatch for the default, then the other colours with the ratios between them."""
    start = _LEFT + 150
    swatches = [("stays", _LEFT), *((f"r{i}", start + _SWATCH * i) for i in range(len(EDGES) + 1))]
    parts = [
        f'<g class="cell {kind}"><rect x="{at}" y="2" width="{_SWATCH}" height="14"/></g>'
        for kind, at in swatches
    ]
    parts.append(draw.text(_LEFT, 30, f"{STAYS} the default stays", "start"))
    parts += [
        draw.text(start + _SWATCH * i, 30, f"{edge:g}") for i, edge in enumerate((1.0, *EDGES))
    ]
    parts.append(
        draw.text(start + _SWATCH * len(swatches) - _SWATCH + 10, 14, "times as fast", "start")
    )
    return "".join(parts)
