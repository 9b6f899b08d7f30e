"""From paired finals to a decision: who is fastest, what ties, and whether the default stays.

Invariants: the same finals always give the same decision (bootstrap intervals are deterministic,
ties fall to a fixed order). A candidate is recommended only if

- the interval of its paired speed-up lies wholly above 1 in every regime that was measured (at the
  power limit, rested, between other kernels), so that it never makes a program slower;
- the geometric mean of those lower bounds exceeds its power penalty;
- the interval lies wholly above 1, too, against other ways that any program has (a compiled
  sequence, the library's own fusion), in the rounds that they took part in.

If the operation demands an order of sums, the default is measured and never stays: its order is not
known. Then every finalist is recommended whatever its speed-up.

Among those the fastest over all regimes wins: programs run somewhere between the regimes. The
figures that are reported are those of the regime in which it gains least.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from statistics import median

from gemmsmith.answers.answer import InRegime, Ratio, Regime
from gemmsmith.core.config import Use
from tuner.measure.statistics import paired_ratio, summarize
from tuner.trial import AgainstRival, Decision, Finals, OnSpread, Rounds


def decide(finals: Finals) -> Decision:
    """Choose among the finalists; without finalists the default stays."""
    if not finals.candidates:
        return Decision(
            candidate=None,
            use=Use.CUBLAS,
            statistics=None,
            baseline=summarize(finals.baseline_us) if finals.baseline_us else None,
            speedup=None,
            correctness=None,
            conditions=finals.conditions,
        )
    everyone = range(len(finals.candidates))
    has_order = finals.problem.operation.summation is not None
    safe = [*everyone] if has_order else [i for i in everyone if _is_safe(finals, i)]
    # If none is safe, a candidate with a known power penalty is reported: it shows why.
    eligible = (
        safe
        or [i for i in everyone if finals.power_penalties and finals.power_penalties[i]]
        or everyone
    )
    # If none is safe, some may have taken part in a regime that others did not take part in.
    shared = [
        rounds for rounds in finals.regimes.values() if all(rounds.samples_us[i] for i in eligible)
    ]
    fastest = min(eligible, key=lambda i: (_mean_us(finals, shared, i), finals.candidates[i].key))
    tied = [i for i in eligible if i == fastest or _ties(finals, shared, i, fastest)]
    chosen = min(tied, key=lambda i: _preference(finals, i))
    measured = {
        regime: rounds for regime, rounds in finals.regimes.items() if rounds.samples_us[chosen]
    }
    least = min(measured.values(), key=lambda rounds: _median_speedup(rounds, chosen))
    return Decision(
        candidate=finals.candidates[chosen],
        use=Use.of(finals.candidates[chosen].kernel) if safe else Use.CUBLAS,
        statistics=summarize(least.samples_us[chosen]),
        baseline=summarize(least.baseline_us) if least.baseline_us else None,
        speedup=_speedup(least, chosen),
        correctness=finals.correctness[chosen],
        conditions=least.conditions,
        ties=tuple(finals.candidates[i].key for i in tied if i != chosen),
        power_penalty=finals.power_penalties[chosen] if finals.power_penalties else None,
        regimes=tuple(_in_regime(regime, rounds, chosen) for regime, rounds in measured.items()),
        rivals=tuple(
            AgainstRival(
                name=rival.name,
                median_us=median(rival.samples_us),
                speedup=paired_ratio(rival.samples_us, finals.samples_us[chosen]),
            )
            for rival in finals.rivals
        ),
        spreads=tuple(
            OnSpread(
                spread=spread.spread,
                median_us=spread.times_us[chosen],
                default_us=spread.default_us,
            )
            for spread in finals.spreads
        ),
    )


def verdict(decision: Decision) -> str:
    """A decision in a line of progress."""
    if decision.candidate is None or decision.statistics is None:
        return "no candidate passed; the default is kept"
    gain = f", {decision.speedup.median:.3f} × the default" if decision.speedup else ""
    cost = f", power penalty {decision.power_penalty:.3f}" if decision.power_penalty else ""
    best = f"{decision.candidate.key} {decision.statistics.median_us:.2f} µs{gain}{cost}"
    if decision.runs is None:
        return f"the default stays, before {best}"
    return f"{decision.use}: {best}"


def _in_regime(regime: Regime, rounds: Rounds, i: int) -> InRegime:
    return InRegime(
        regime=regime,
        speedup=_speedup(rounds, i),
        median_us=median(rounds.samples_us[i]),
        default_us=median(rounds.baseline_us) if rounds.baseline_us else None,
    )


def _speedup(rounds: Rounds, i: int) -> Ratio | None:
    """Candidate i's speed-up over the default; None if the default could not be timed."""
    return paired_ratio(rounds.baseline_us, rounds.samples_us[i]) if rounds.baseline_us else None


def _median_speedup(rounds: Rounds, i: int) -> float:
    ratio = _speedup(rounds, i)
    return 1.0 if ratio is None else ratio.median


def _is_safe(finals: Finals, i: int) -> bool:
    """Whether candidate i meets the three conditions of the module's docstring.

    The penalty is compared with the mean over the regimes, not with each: it is what power costs
    in programs at the power limit, and there a candidate gains what it gains in sustained rounds.
    """
    penalty = _penalty(finals, i)
    regimes = finals.regimes.values()
    if penalty is None or not all(rounds.samples_us[i] for rounds in regimes):
        return False
    if not _beats_rivals(finals, i):
        return False
    lows = [ratio.ci_low for rounds in regimes if (ratio := _speedup(rounds, i)) is not None]
    return all(low > 1.0 for low in lows) and (not lows or _geometric_mean(lows) > penalty)


def _beats_rivals(finals: Finals, i: int) -> bool:
    return all(
        paired_ratio(rival.samples_us, finals.samples_us[i]).ci_low > 1.0
        for rival in finals.rivals
        if rival.is_to_be_beaten
    )


def _penalty(finals: Finals, i: int) -> float | None:
    """The factor on candidate i's time in a program; None if it was not measured."""
    return finals.power_penalties[i] if finals.power_penalties else 1.0


def _mean_us(finals: Finals, regimes: Sequence[Rounds], i: int) -> float:
    """The geometric mean of candidate i's medians in microseconds, times its power penalty."""
    times = [median(rounds.samples_us[i]) for rounds in regimes]
    return _geometric_mean(times) * (_penalty(finals, i) or 1.0)


def _ties(finals: Finals, regimes: Sequence[Rounds], i: int, fastest: int) -> bool:
    """Whether candidate i may be as fast as the fastest over all regimes.

    All regimes have the same weight, however many rounds they have: a kernel that is 4% slower in
    one and not faster in the others is slower.
    """
    penalty = (_penalty(finals, i) or 1.0) / (_penalty(finals, fastest) or 1.0)
    lows = [
        paired_ratio(rounds.samples_us[i], rounds.samples_us[fastest]).ci_low for rounds in regimes
    ]
    return _geometric_mean(lows) * penalty <= 1.0


def _geometric_mean(values: Sequence[float]) -> float:
    # Not statistics.geometric_mean: it rounds differently, and recorded decisions must not change.
    return float(prod(values) ** (1 / len(values)))


def _preference(finals: Finals, i: int) -> tuple[bool, int, str]:
    """The fixed order inside a tie: fixed reduction order, smaller workspace, name."""
    candidate = finals.candidates[i]
    return (not candidate.has_fixed_order, finals.workspace_bytes[i], candidate.key)
