"""The trials of a run: the best time so far, and which tile, cluster and stages are fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

from markupsafe import Markup

from gemmsmith.core.kernel import AnyKernel, CutlassKernel
from service.charts import draw
from tuner.store.trials import Tried
from tuner.trial import Phase

_HEIGHT, _TRAIT_HEIGHT = 250, 270
_GAP = 84
"""Space between the two charts of a convergence."""

_UNDER = 58
"""Height of the columns' names under the axis."""

_COLUMNS = 10
"""Only the fastest columns are drawn: more names would not fit beside each other."""

_SLOWEST = 4.0
"""Times above this multiple of the fastest are drawn at the upper edge."""

_LANES = 9
"""Dots of a column lie in so many vertical lanes."""


def convergence(run: Sequence[Tried], result_us: float | None = None) -> Markup:
    """Draw the best time so far of one run's trials, oldest first, against trials and seconds.

    Only the screening's times count: finals measure the same candidates again, in other regimes. A
    failed trial counts as a trial without a time. `result_us` is the result of the run's finals,
    drawn as a dashed line. Empty with fewer than two screened trials.
    """
    screened = [trial for trial in run if trial.phase is Phase.SCREEN]
    times = [float("inf") if trial.median_us is None else trial.median_us for trial in screened]
    best = [*accumulate(times, min)]
    steps = [
        (float(i + 1), trial.at - screened[0].at, us)
        for i, (trial, us) in enumerate(zip(screened, best, strict=True))
        if us < float("inf")
    ]
    if not steps or len(screened) < 2:
        return Markup("")
    low, high = best[-1], steps[0][-1]
    label = f"Best time against trials and seconds: {low:.2f} µs after {len(screened)} trials"
    if result_us is not None:
        low, high = min(low, result_us), max(high, result_us)
        label += f"; the finals' result is {result_us:.2f} µs"
    margin = 0.08 * (high - low) or 0.05 * high  # the second one if all times are equal
    y = draw.Scale(low - margin, high + margin, _HEIGHT - draw.BOTTOM, draw.TOP)
    half = (draw.WIDTH - draw.LEFT - draw.RIGHT - _GAP) / 2
    trials = draw.Scale(0, steps[-1][0], draw.LEFT, draw.LEFT + half)
    seconds = draw.Scale(0, steps[-1][1] or 1.0, draw.LEFT + half + _GAP, draw.WIDTH - draw.RIGHT)
    return draw.svg(
        _HEIGHT,
        label,
        _best([(trial, us) for trial, _, us in steps], trials, y, "trials"),
        _best([(second, us) for _, second, us in steps], seconds, y, "seconds"),
        *(_result(result_us, x, y) for x in (trials, seconds) if result_us is not None),
    )


def _best(steps: Sequence[tuple[float, float]], x: draw.Scale, y: draw.Scale, name: str) -> str:
    """Draw a line that falls at each trial that was faster than all before it."""
    (first, best), *rest = steps
    line: list[str | float] = ["M", x(first), y(best)]
    for at, us in rest:
        if us < best:
            line += ["H", x(at), "V", y(us)]
            best = us
    return (
        draw.horizontal_axis(x, y, name)
        + draw.vertical_axis(x, y, "best µs so far")
        + draw.group("won", f"{best:.2f} µs", draw.path("best", *line, "H", x.end))
    )


def _result(us: float, x: draw.Scale, y: draw.Scale) -> str:
    line = draw.path("nominal", "M", x.start, y(us), "H", x.end)
    label = draw.text(x.end, y(us) - 4, f"result {us:.2f}", "end")
    return draw.group("tie", f"result of the finals: {us:.2f} µs", line, label)


Trait = Callable[[CutlassKernel], str]

TRAITS: tuple[tuple[str, Trait], ...] = (
    ("Tile", lambda kernel: "×".join(map(str, kernel.tile))),
    ("Cluster", lambda kernel: "×".join(map(str, kernel.cluster))),
    ("Stages", lambda kernel: str(kernel.stages or "as many as fit")),
)
"""Name and value of each trait that the pages draw a chart of."""


def by_trait(trials: Sequence[Tried], name: str, trait: Trait) -> Markup:
    """Draw all trials by a trait of their kernels; empty if nothing was measured.

    There is a column for each value, the fastest first, with its trials as dots on a logarithmic
    axis of times. A ring marks the fastest trial. Kernels of other libraries than CUTLASS have no
    traits: their column is their backend's.
    """

    def value_of(kernel: AnyKernel) -> str:
        return trait(kernel) if isinstance(kernel, CutlassKernel) else kernel.source

    columns: defaultdict[str, list[float]] = defaultdict(list)
    failed: defaultdict[str, int] = defaultdict(int)
    for trial in trials:
        if trial.median_us is None:
            failed[value_of(trial.kernel)] += 1
        else:
            columns[value_of(trial.kernel)].append(trial.median_us)
    if not columns:
        return Markup("")
    ordered = sorted(columns, key=lambda value: (min(columns[value]), value))
    shown = ordered[:_COLUMNS]
    best = min(columns[shown[0]])
    slowest = max(us for value in shown for us in columns[value])
    high = max(min(slowest, _SLOWEST * best), best * 1.05)
    bottom = _TRAIT_HEIGHT - _UNDER
    x = draw.Scale(0, len(shown), draw.LEFT, draw.WIDTH - draw.RIGHT)
    y = draw.Scale(best / 1.03, high * 1.03, bottom, draw.TOP, log=True)
    parts = [draw.vertical_axis(x, y, "µs per launch")]
    spread = min((x(1) - x(0)) * 0.7, 150) / _LANES
    for i, value in enumerate(shown):
        middle = x(i + 0.5)
        times = sorted(columns[value])
        # All dots of a column are one path, because a run has thousands of trials.
        dots: list[str | float] = []
        for place, us in enumerate(times):
            dots += ["M", middle + spread * _lane(place), y(us), "h0"]
        ring = (
            f'<circle class="ring" cx="{middle + spread * _lane(0):.1f}" cy="{y(best):.1f}" r="6"/>'
        )
        lost = f", {failed[value]} failed" if failed[value] else ""
        parts.append(
            draw.group(
                "column",
                f"{value}: {len(times)} measured{lost}, fastest {times[0]:.2f} µs",
                draw.path("dots", *dots),
                ring if i == 0 else "",
                draw.text(middle, bottom + 16, value),
                draw.text(middle, bottom + 31, f"{len(times)}{lost}"),
            )
        )
    slower = len(ordered) - len(shown)
    more = f"; {slower} slower ones are left out" if slower else ""
    parts.append(draw.text((x.start + x.end) / 2, bottom + 50, f"{name}, fastest first{more}"))
    return draw.svg(_TRAIT_HEIGHT, f"Trials by {name.lower()}", *parts)


def _lane(place: int) -> int:
    """Return the lane of the dot with that rank, so that dots of similar times do not overlap."""
    # A step of 4 visits all 9 lanes in 9 ranks, and neighbouring ranks are at least 4 lanes apart.
    return (place * 4 + _LANES // 2) % _LANES - _LANES // 2
