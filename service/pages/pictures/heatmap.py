"""A heat map of ratios over M and N: a cell for each problem, with its ratio written in it.

A cell's colour says what is served: `stays` where the default stays, whatever the best candidate's
ratio is, else one of the classes `r0` … `r5` of the stylesheet, from a little to far ahead: the
same ratio has the same colour on every map. Cells are links. Extents are in order, evenly spaced:
measured sizes are no regular grid.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from service.report.axes import TOP, WIDTH, svg, text, title, upright

EDGES = (1.02, 1.05, 1.1, 1.25, 2.0)
"""Ratios at which the colour changes."""

STAYS = "="
"""What is written in a cell where the default stays."""

_LEFT, _UNDER = 84, 62
_HIGHEST = 40
_LEGEND = 34


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A problem that has a winner; `ratio` is the best candidate's, None where nothing was paired.

    `stays`: callers are told to run the default.
    """

    m: int
    n: int
    ratio: float | None
    stays: bool
    href: str
    name: str


def colour(cell: Cell) -> str:
    """The class of a cell's colour."""
    if cell.stays or cell.ratio is None:
        return "stays"
    return f"r{bisect(EDGES, cell.ratio)}"


def heatmap(cells: Sequence[Cell]) -> str:
    """The picture with its legend; empty for no cells."""
    if not cells:
        return ""
    rows = sorted({cell.m for cell in cells}, reverse=True)
    columns = sorted({cell.n for cell in cells})
    wide = (WIDTH - _LEFT - 8) / len(columns)
    high = min(_HIGHEST, max(18, 640 / len(rows)))
    bottom = _LEGEND + TOP + high * len(rows)
    height = round(bottom + _UNDER)
    parts = [_legend()]
    for i, m in enumerate(rows):
        parts.append(text(_LEFT - 6, _LEGEND + TOP + high * (i + 0.5) + 4, str(m), "end"))
    every = max(1, -(-len(columns) * 44 // int(WIDTH - _LEFT)))  # labels that do not collide
    for j, n in enumerate(columns):
        if j % every == 0:
            parts.append(text(_LEFT + wide * (j + 0.5), bottom + 16, str(n), "middle"))
    place = {m: i for i, m in enumerate(rows)}, {n: j for j, n in enumerate(columns)}
    for cell in cells:
        corner = (_LEFT + wide * place[1][cell.n], _LEGEND + TOP + high * place[0][cell.m])
        parts.append(_cell(cell, corner, (wide, high)))
    parts.append(text((_LEFT + WIDTH) / 2, bottom + 40, "N", "middle"))
    parts.append(upright(height, "M"))
    return svg(height, "What is served over M and N", parts, links=True)


def _cell(cell: Cell, corner: tuple[float, float], size: tuple[float, float]) -> str:
    (x, y), (wide, high) = corner, size
    best = "not paired" if cell.ratio is None else f"{cell.ratio:.3f}"
    ratio = STAYS if cell.stays else "–" if cell.ratio is None else f"{cell.ratio:.2f}"
    said = f"the default stays, best candidate {best}" if cell.stays else best
    words = text(x + wide / 2, y + high / 2 + 4, ratio, "middle") if wide >= 30 else ""
    return (
        f'<a href="{escape(cell.href)}" class="cell {colour(cell)}">'
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}" '
        f'rx="3"/>{words}{title(f"{cell.name}: {said}")}</a>'
    )


def _legend() -> str:
    """A swatch where the default stays, then one for each colour with the ratios between them."""
    wide = 64.0
    start = _LEFT + 150
    parts = [
        f'<g class="cell stays"><rect x="{_LEFT}" y="2" width="{wide:.1f}" height="14"/></g>',
        text(_LEFT, 30, "= the default stays", "start"),
    ]
    for i in range(len(EDGES) + 1):
        parts.append(
            f'<g class="cell r{i}"><rect x="{start + wide * i:.1f}" y="2" width="{wide:.1f}" '
            'height="14"/></g>'
        )
    for i, edge in enumerate((1.0, *EDGES)):
        parts.append(text(start + wide * i, 30, f"{edge:g}", "middle"))
    parts.append(text(start + wide * (len(EDGES) + 1) + 10, 14, "times as fast", "start"))
    return "".join(parts)
