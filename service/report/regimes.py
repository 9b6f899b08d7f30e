"""How much faster than the default a winner is, regime by regime, in words for people.

The speed-up that is served is that of the regime in which the winner gains least. The power penalty
is compared with the geometric mean of the regimes, so a penalty above the served speed-up is no
contradiction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from gemmsmith.answers.answer import InRegime, Ratio
from gemmsmith.core.device import recording_of


def lines(
    speedup: Ratio | None,
    regimes: Sequence[InRegime],
    power_penalty: float | None,
    recorded: str = "",
) -> Iterator[tuple[str, str]]:
    """A label and a text for each line: the speed-up, each regime, the power penalty.

    `recorded` names the GPU model whose recorded times these are, if so.
    """
    if speedup is not None:
        # What has a penalty was measured in all regimes, even if only the least was kept.
        several = len(regimes) > 1 or power_penalty is not None
        least = ", in the regime where it gains least" if several else ""
        yield "speed-up", f"{_ratio(speedup)} × the default{least}"
    for found in regimes:
        compared = f"{_ratio(found.speedup)}: " if found.speedup else ""
        default = f", default {found.default_us:.2f} µs" if found.default_us is not None else ""
        source = f" ({recording_of(recorded)})" if recorded else ""
        times = f"{found.median_us:.2f} µs{default}{source}"
        yield "regime", f"{found.regime.value:<11} {compared}{times}"
    if power_penalty is not None:
        yield "penalty", f"{power_penalty:.3f}{_against(regimes)}"


def summary(regimes: Sequence[InRegime], power_penalty: float | None) -> str:
    """The regimes and the power penalty in a clause; empty where nothing is known of them."""
    parts = [
        f"{found.regime.value} {found.speedup.median:.3f}" for found in regimes if found.speedup
    ]
    said = [f"regimes: {', '.join(parts)}"] if parts else []
    if power_penalty is not None:
        said.append(f"power penalty {power_penalty:.3f}")
    return "; ".join(said)


def mean(regimes: Sequence[InRegime]) -> float | None:
    """Geometric mean of the ratios; None where one is not known."""
    ratios = [found.speedup.median for found in regimes if found.speedup]
    if not ratios or len(ratios) < len(regimes):
        return None
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _against(regimes: Sequence[InRegime]) -> str:
    over_all = mean(regimes)
    if over_all is None:
        return "; the mean of the regimes must exceed it, and was not kept"
    return f"; the mean of the regimes must exceed it: {over_all:.3f}"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f}  ({ratio.ci_low:.3f} … {ratio.ci_high:.3f})"
