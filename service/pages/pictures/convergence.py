"""The best time of a run so far, against trials and against seconds.

Times of the screening alone: finals measure the same candidates again, in other regimes, and are
drawn on their own. What failed counts as a trial that found nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from service.report.axes import BOTTOM, LEFT, RIGHT, TOP, WIDTH, linear, steps, svg, text, title
from tuner.store.tried import Tried
from tuner.trial import Phase

HEIGHT = 250
_GAP = 84
_TICKS = 5


def convergence(run: Sequence[Tried], result_us: float | None = None) -> str:
    """The picture of one run's trials, oldest first; empty before two were screened.

    `result_us` is what the run came to in its finals, which is drawn as a line.
    """
    screened = [one for one in run if one.phase is Phase.SCREEN]
    begin = next((i for i, one in enumerate(screened) if one.median_us is not None), None)
    if begin is None or len(screened) < 2:
        return ""
    times = [one.median_us if one.median_us is not None else float("inf") for one in screened]
    best = [*accumulate(times, min)]
    points = [
        (float(i + 1), screened[i].at - screened[0].at, best[i])
        for i in range(begin, len(screened))
    ]
    low, high = best[-1], best[begin]
    if result_us is not None:
        low, high = min(low, result_us), max(high, result_us)
    margin = 0.08 * (high - low) or 0.05 * high
    edges = (low - margin, high + margin)
    half = (WIDTH - LEFT - RIGHT - _GAP) / 2
    left, right = (LEFT, LEFT + half), (WIDTH - RIGHT - half, WIDTH - RIGHT)
    parts = [
        _panel([(trial, us) for trial, _, us in points], left, edges, "trials", result_us),
        _panel([(second, us) for _, second, us in points], right, edges, "seconds", result_us),
        f'<text transform="translate(14 {(HEIGHT - BOTTOM + TOP) / 2:.1f}) rotate(-90)" '
        'text-anchor="middle">best µs so far</text>',
    ]
    said = f"Best time against trials and seconds: {best[-1]:.2f} µs after {len(screened)} trials"
    said += f"; the finals' result is {result_us:.2f} µs" if result_us is not None else ""
    return svg(HEIGHT, said, parts)


def _panel(
    points: Sequence[tuple[float, float]],
    between: tuple[float, float],
    edges: tuple[float, float],
    name: str,
    result_us: float | None,
) -> str:
    start, end = between
    low, high = edges
    last = points[-1][0] or 1.0
    x = linear(0, last, start, end)
    y = linear(low, high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<path class="grid" d="M{start:.1f} {y(tick):.1f}H{end:.1f}"/>'
        + text(start - 6, y(tick) + 4, f"{tick:g}", "end")
        for tick in steps(low, high, _TICKS)
    ]
    parts += [
        f'<path class="grid" d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        + text(x(tick), HEIGHT - BOTTOM + 15, f"{tick:g}", "middle")
        for tick in steps(0, last, _TICKS)
    ]
    (first, began), *rest = points
    drawn = f"M{x(first):.1f} {y(began):.1f}"
    was = began
    for at, us in rest:
        if us < was:
            drawn += f"H{x(at):.1f}V{y(us):.1f}"
            was = us
    drawn += f"H{end:.1f}"
    parts.append(f'<g class="won"><path class="best" d="{drawn}"/>{title(f"{was:.2f} µs")}</g>')
    if result_us is not None:
        line = f'<path class="nominal" d="M{start:.1f} {y(result_us):.1f}H{end:.1f}"/>'
        label = text(end, y(result_us) - 4, f"result {result_us:.2f}", "end")
        parts.append(f"<g>{line}{title(f'result of the finals: {result_us:.2f} µs')}{label}</g>")
    parts.append(text((start + end) / 2, HEIGHT - 6, name, "middle"))
    return "".join(parts)
