"""All trials of a run by one of the kernel's traits: which tile, cluster or stages are fast.

A column for each value, the fastest first, its trials as dots on a logarithmic axis of times, side
by side. A ring is the run's fastest. Dots of a column are one path: a run has thousands.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from gemmsmith.kernel import AnyKernel, CutlassKernel
from service.report.axes import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    decades,
    log_scale,
    svg,
    text,
    title,
    upright,
)
from tuner.store.tried import Tried

HEIGHT = 270
_UNDER = 58
"""Room for the names of columns under the axis."""

_COLUMNS = 10
"""Columns drawn at most, the fastest: more names would not fit beside each other."""

_SLOWEST = 4.0
"""Times beyond so many times the fastest are drawn at the upper edge."""

_LANES = 9


def _sizes(extents: Sequence[int]) -> str:
    return "×".join(map(str, extents))


def tile(kernel: AnyKernel) -> str:
    """The tile of a kernel; of one that has none that we know, its backend."""
    return _sizes(kernel.tile) if isinstance(kernel, CutlassKernel) else kernel.backend.value


def cluster(kernel: AnyKernel) -> str:
    """The cluster, likewise."""
    return _sizes(kernel.cluster) if isinstance(kernel, CutlassKernel) else kernel.backend.value


def stages(kernel: AnyKernel) -> str:
    """The stages, likewise; 0 is as many as fit."""
    if not isinstance(kernel, CutlassKernel):
        return kernel.backend.value
    return str(kernel.stages) if kernel.stages else "as many as fit"


TRAITS: tuple[tuple[str, Callable[[AnyKernel], str]], ...] = (
    ("Tile", tile),
    ("Cluster", cluster),
    ("Stages", stages),
)
"""What the pages draw, one picture each."""


def scatter(trials: Sequence[Tried], name: str, trait: Callable[[AnyKernel], str]) -> str:
    """The picture of one trait; empty where nothing was measured."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    failed: defaultdict[str, int] = defaultdict(int)
    for one in trials:
        if one.median_us is None:
            failed[trait(one.kernel)] += 1
        else:
            columns[trait(one.kernel)].append(one.median_us)
    if not columns:
        return ""
    listed = sorted(columns, key=lambda value: (min(columns[value]), value))
    left_out = listed[_COLUMNS:]
    shown = listed[:_COLUMNS]
    best = min(columns[shown[0]])
    slowest = max(us for value in shown for us in columns[value])
    low, high = best / 1.03, max(min(slowest, _SLOWEST * best), best * 1.05) * 1.03
    y = log_scale(low, high, HEIGHT - _UNDER, TOP)
    parts = [
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
        + text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end")
        for tick in _ticks(low, high)
    ]
    wide = (WIDTH - LEFT - RIGHT) / len(shown)
    for i, value in enumerate(shown):
        middle = LEFT + wide * (i + 0.5)
        times = sorted(columns[value])
        spread = min(wide * 0.7, 150) / _LANES
        dots = "".join(
            f"M{middle + spread * _lane(place):.1f} {y(min(us, high)):.1f}h0"
            for place, us in enumerate(times)
        )
        lost = f", {failed[value]} failed" if failed[value] else ""
        said = f"{value}: {len(times)} measured{lost}, fastest {times[0]:.2f} µs"
        ring = (
            f'<circle class="ring" cx="{middle + spread * _lane(0):.1f}" cy="{y(best):.1f}" r="6"/>'
            if times[0] == best and value == shown[0]
            else ""
        )
        under = HEIGHT - _UNDER
        parts.append(
            f'<g class="column"><path class="dots" d="{dots}"/>{ring}'
            + text(middle, under + 16, value, "middle")
            + text(middle, under + 31, f"{len(times)}{lost}", "middle")
            + title(said)
            + "</g>"
        )
    more = f"; {len(left_out)} slower ones are left out" if left_out else ""
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 8, f"{name}, fastest first{more}", "middle"))
    parts.append(upright(HEIGHT, "µs per launch"))
    return svg(HEIGHT, f"Trials by {name.lower()}", parts)


def _lane(place: int) -> int:
    """Where a dot lies beside its column's middle: its neighbours in time lie far from it."""
    return (place * 4 + _LANES // 2) % _LANES - _LANES // 2


def _ticks(low: float, high: float) -> list[float]:
    """Of a logarithmic axis that may span less than a decade: as many round values as fit."""
    ticks = decades(low, high)
    if len(ticks) >= 3:
        return ticks
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
