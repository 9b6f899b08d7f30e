"""docs/choosing.md's picture: why a candidate must be faster in three regimes, and by how much.

Three shipped problems, chosen by rule: the served one whose gain differs most between the regimes,
one that is slower in a single regime, and one that is faster in all but not served because of its
power.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.readme.shipped import ROOT, geometric_mean, is_aligned, short
from tuner.trial import Winner

FILE = ROOT / "docs" / "images" / "regimes.svg"


def gains(winner: Winner) -> list[float]:
    """Return the candidate's speed-up in each regime; empty unless all three were measured."""
    speedups = [r.speedup.median for r in winner.regimes if r.speedup is not None]
    return speedups if len(speedups) == 3 else []


def mean(winner: Winner) -> float:
    """Return the mean of the gains, which must exceed the power penalty."""
    return geometric_mean(gains(winner))


def spread(winner: Winner) -> float:
    return max(gains(winner)) / min(gains(winner))


def examples(winners: Sequence[Winner]) -> dict[str, Winner]:
    """Choose a problem for each verdict."""
    full = [w for w in winners if gains(w) and is_aligned(w) and w.problem.batch == 1]
    served = [w for w in full if not w.use.is_default]
    stays = [w for w in full if w.use.is_default]
    slower = [w for w in stays if sum(gain < 0.99 for gain in gains(w)) == 1]
    hungry = [
        w
        for w in stays
        if min(gains(w)) > 1.01 and w.power_penalty is not None and w.power_penalty > mean(w)
    ]
    return {
        "served: ahead in all three": max(served, key=spread),
        "not served: behind in one": max(slower, key=spread),
        "not served: gains less than its power penalty": max(hungry, key=mean),
    }


def draw(winners: Sequence[Winner]) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "gemmsmith"
    from matplotlib import pyplot

    chosen = examples(winners)
    figure, panels = pyplot.subplots(
        1, len(chosen), figsize=(11, 3.4), sharey=True, layout="constrained"
    )
    for panel, (verdict, winner) in zip(panels, chosen.items(), strict=True):
        colour = "#9a9a9a" if winner.use.is_default else "#1b6ca8"
        panel.axhline(1.0, color="#888888", linewidth=1)
        for x, regime in enumerate(winner.regimes):
            ratio = regime.speedup
            assert ratio is not None
            spread_of = [[ratio.median - ratio.ci_low], [ratio.ci_high - ratio.median]]
            panel.errorbar(x, ratio.median, yerr=spread_of, fmt="o", color=colour, capsize=3)
        panel.axhline(mean(winner), color=colour, linestyle="--", linewidth=1, label="their mean")
        if winner.power_penalty is not None:
            panel.axhline(
                winner.power_penalty, color="#c8553d", linestyle=":", label="power penalty"
            )
        panel.set_xticks(range(3), [r.regime.value for r in winner.regimes])
        panel.set_xlim(-0.5, 2.5)
        panel.set_title(f"{verdict}\n{winner.problem}, {short(winner.device)}", fontsize=9)
        panel.grid(axis="y", color="#eeeeee", linewidth=0.6)
        panel.legend(fontsize=8, loc="best")
    panels[0].set_ylabel("default's time / candidate's time")
    figure.savefig(FILE, metadata={"Date": None})
    pyplot.close(figure)
