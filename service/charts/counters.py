"""Counters of a profile: rows of shares, with the candidate as a disc and the default as a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from service.charts import draw
from service.report.explained import SHOWN_WAIT
from tuner.explain.waits import words
from tuner.profiling.records import Counters, ProblemProfile

_NAMES, _VALUES = 190, 90
"""Room at the left for the names, and then for the shares, which narrow screens show too."""
_ROW = 26
_NARROWEST = 0.01
"""Share at the end of the axis, at least."""

_UNITS: dict[str, Callable[[Counters], float | None]] = {
    "tensor pipe active": lambda kernel: kernel.tensor,
    "issue slots busy": lambda kernel: kernel.issue,
    "busiest unit of the SM": lambda kernel: kernel.sm,
    "L2 throughput": lambda kernel: kernel.l2,
    "DRAM throughput": lambda kernel: kernel.dram,
    "warps on an SM": lambda kernel: kernel.occupancy,
}

_Row = tuple[str, float | None, float | None]


def units(profile: ProblemProfile) -> Markup:
    """Draw how busy the units are; empty if nothing was counted."""
    ours, theirs = profile.candidate.main, profile.default.main
    rows = [(name, of(ours), of(theirs)) for name, of in _UNITS.items()]
    return _pairs(rows, "How busy the units are", "% of the peak")


def waits(profile: ProblemProfile) -> Markup:
    """Draw what a warp waits for, the longest first; empty if it was not counted."""
    ours, theirs = profile.candidate.main.waits, profile.default.main.waits
    shares = {
        reason: max(ours.get(reason, 0.0), theirs.get(reason, 0.0)) for reason in ours | theirs
    }
    order = sorted(shares, key=shares.__getitem__, reverse=True)
    rows = [
        (words(reason), ours.get(reason), theirs.get(reason))
        for reason in order
        if shares[reason] >= SHOWN_WAIT
    ]
    return _pairs(rows, "What a warp waits for", "% of its time")


def _pairs(rows: Sequence[_Row], label: str, axis: str) -> Markup:
    rows = [row for row in rows if row[1:] != (None, None)]
    if not rows:
        return Markup("")
    bottom = draw.TOP + _ROW * len(rows)
    most = max(share for _, *shares in rows for share in shares if share is not None)
    x = draw.Scale(
        0, min(100, 105 * max(most, _NARROWEST)), _NAMES + _VALUES, draw.WIDTH - draw.RIGHT
    )
    parts = [draw.horizontal_axis(x, draw.Scale(0, 1, draw.TOP, bottom), axis)]
    parts += [_pair(row, x, draw.TOP + _ROW * (i + 0.5)) for i, row in enumerate(rows)]
    return draw.svg(bottom + draw.BOTTOM, label, *parts)


def _pair(row: _Row, x: draw.Scale, y: float) -> str:
    name, ours, theirs = row
    places = [None if share is None else x(100 * share) for share in (ours, theirs)]
    known = [place for place in places if place is not None]
    shares = ["not counted" if share is None else f"{share:.1%}" for share in (ours, theirs)]
    value = " · ".join(map(_short, (ours, theirs)))
    circles = [
        f'<circle class="{kind}" cx="{place:.1f}" cy="{y:.1f}" r="{radius}"/>'
        for place, kind, radius in zip(places[::-1], ("cublas", "cutlass"), (4, 3.5), strict=True)
        if place is not None
    ]
    return draw.group(
        "point",
        f"{name}: candidate {shares[0]}, default {shares[1]}",
        draw.path("", "M", min(known), y, "H", max(known)),
        *circles,
        draw.text(_NAMES - 10, y + 4, name, "end"),
        draw.text(_NAMES + _VALUES - 12, y + 4, value, "end"),
    )


def _short(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
