"""The ratio to the default in each regime, and what power asks of their mean.

A line for each regime: the 95% interval, the median, the times. The solid line is the default; the
dashed one is the power penalty, which the mean of the regimes must reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.answers.answer import InRegime, Ratio
from service.report.axes import BOTTOM, RIGHT, TOP, WIDTH, Scale, linear, steps, svg, text, title

_LINE = 34
_NAMES, _TIMES = 190, 170
"""Room for the names on the left, and for the times on the right."""


def regimes(
    found: Sequence[InRegime], power_penalty: float | None, mean: float | None, default: str
) -> str:
    """The picture; empty where no regime has a ratio."""
    paired = [(one, one.speedup) for one in found if one.speedup]
    if not paired:
        return ""
    every = [1.0, *(at for _, ratio in paired for at in (ratio.ci_low, ratio.ci_high))]
    if power_penalty is not None:
        every += [power_penalty, *([mean] if mean is not None else [])]
    margin = max(0.06 * (max(every) - min(every)), 0.004)
    low, high = min(every) - margin, max(every) + margin
    rows = len(paired) + (mean is not None and len(paired) > 1)
    height = TOP + 18 + _LINE * rows + BOTTOM
    x = linear(low, high, _NAMES, WIDTH - RIGHT - _TIMES)
    parts = [
        f'<path class="grid" d="M{x(tick):.1f} {TOP + 18}V{height - BOTTOM}"/>'
        + text(x(tick), height - BOTTOM + 15, f"{tick:g}", "middle")
        for tick in steps(low, high)
    ]
    parts.append(_upright(x(1.0), height, "one", default))
    if power_penalty is not None and power_penalty > 1:
        parts.append(_upright(x(power_penalty), height, "ridge", f"penalty {power_penalty:.3f}"))
    for i, (one, ratio) in enumerate(paired):
        at = TOP + 18 + _LINE * (i + 0.5)
        against = f" against {one.default_us:.2f}" if one.default_us is not None else ""
        parts.append(_line(one.regime.value, ratio, f"{one.median_us:.2f} µs{against}", at, x))
    if rows > len(paired) and mean is not None:
        at = TOP + 18 + _LINE * (rows - 0.5)
        exactly = Ratio(median=mean, ci_low=mean, ci_high=mean)
        parts.append(_line("geometric mean", exactly, f"{mean:.3f}", at, x))
    middle = (_NAMES + WIDTH - RIGHT - _TIMES) / 2
    parts.append(text(middle, height - 6, f"time of {default} / time of the candidate", "middle"))
    return svg(height, "Ratio to the default in each regime", parts)


def _upright(x: float, height: int, kind: str, name: str) -> str:
    line = f'<path class="{kind}" d="M{x:.1f} {TOP + 16}V{height - BOTTOM}"/>'
    return line + text(x, TOP + 10, name, "middle")


def _line(name: str, ratio: Ratio, times: str, at: float, x: Scale) -> str:
    kind = "won" if ratio.ci_low > 1 else "behind" if ratio.ci_high < 1 else "tie"
    said = f"{ratio.median:.3f} ({ratio.ci_low:.3f} to {ratio.ci_high:.3f})"
    return (
        f'<g class="{kind}"><path class="interval" d="M{x(ratio.ci_low):.1f} {at:.1f}'
        f'H{x(ratio.ci_high):.1f}"/><path class="median" d="M{x(ratio.median):.1f} {at - 10:.1f}'
        f'v20"/>'
        + text(_NAMES - 12, at + 4, name, "end")
        + text(WIDTH - RIGHT, at + 4, times, "end")
        + title(f"{name}: {said}; {times}")
        + "</g>"
    )
