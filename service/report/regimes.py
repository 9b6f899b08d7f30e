"""Says in words for people how much faster than the default a winner is in each regime.

An answer's speed-up is that of the regime in which the winner gains least. The power penalty is
compared with the geometric mean of the regimes, so it may be above the answer's speed-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from gemmsmith.answers.answer import InRegime, Ratio
from gemmsmith.core.device import recording_of


def lines(
    speedup: Ratio | None,
    regimes: Sequence[InRegime],
    power_penalty: float | None,
    recorded: str = "",
) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each line: the speed-up, each regime, the power penalty.

    `recorded` is the GPU model whose recorded times these are; empty for measured times.
    """
    if speedup is not None:
        # A winner with a penalty was measured in all regimes, even if only the least was kept.
        several = len(regimes) > 1 or power_penalty is not None
        least = ", in the regime where it gains least" if several else ""
        yield "speed-up", f"{_ratio(speedup)} × the default{least}"
    for item in regimes:
        ratio = f"{_ratio(item.speedup)}: " if item.speedup else ""
        default = f", default {item.default_us:.2f} µs" if item.default_us is not None else ""
        source = f" ({recording_of(recorded)})" if recorded else ""
        times = f"{item.median_us:.2f} µs{default}{source}"
        yield "regime", f"{item.regime.value:<11} {ratio}{times}"
    if power_penalty is not None:
        average = mean(regimes)
        said = ", and was not kept" if average is None else f": {average:.3f}"
        yield "penalty", f"{power_penalty:.3f}; the mean of the regimes must exceed it{said}"


def summary(regimes: Sequence[InRegime], power_penalty: float | None) -> str:
    """Say the regimes' ratios and the power penalty in one line; empty if neither is known."""
    ratios = [f"{item.regime.value} {item.speedup.median:.3f}" for item in regimes if item.speedup]
    clauses = [f"regimes: {', '.join(ratios)}"] if ratios else []
    if power_penalty is not None:
        clauses.append(f"power penalty {power_penalty:.3f}")
    return "; ".join(clauses)


def mean(regimes: Sequence[InRegime]) -> float | None:
    """Return the geometric mean of the ratios; None if a ratio is unknown."""
    ratios = [item.speedup.median for item in regimes if item.speedup]
    if not ratios or len(ratios) < len(regimes):
        return None
    return geometric_mean(ratios)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f}  ({ratio.ci_low:.3f} … {ratio.ci_high:.3f})"
