"""From paired finals to a winner: who is fastest, who ties with it, and whether cuBLAS stays.

Invariants: the same finals always give the same winner (bootstrap intervals have a fixed seed,
ties fall to a fixed order), and CUTLASS is recommended only where the interval of its paired
speed-up lies wholly above 1 in every state of the GPU that was measured, at the power limit, rested
and between other kernels, and between them above what its power costs, so an answer never makes a
program slower. Among those the winner is the one that is fastest between the states, where programs
are; what is reported of it is the state in which it gains less. Where other ways than the default
took part that any program has (a compiled sequence, the library's own fusion), it gains on those
too, in the rounds that they took part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from gemmsmith.answers.answer import Conditions, Correctness, InRegime, Ratio, Regime, Statistics
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.config import Use
from tuner.measure.statistics import paired_ratio, summarize
from tuner.trial import AgainstRival, Finals, OnSpread, Rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the finals say. `ties` holds the keys that could not be told from the winner.

    `statistics`, `baseline`, `speedup` and `conditions` are of one regime; `power_penalty` is what
    the candidate's power costs, None where it was not measured.
    """

    candidate: Candidate | None
    use: Use
    statistics: Statistics | None
    baseline: Statistics | None
    speedup: Ratio | None
    correctness: Correctness | None
    conditions: Conditions
    ties: tuple[str, ...] = ()
    power_penalty: float | None = None
    regimes: tuple[InRegime, ...] = ()
    rivals: tuple[AgainstRival, ...] = ()
    spreads: tuple[OnSpread, ...] = ()

    @property
    def winner(self) -> Candidate | None:
        """The candidate that is promoted; None where the default stays."""
        return None if self.use.is_default else self.candidate

    def ahead(self, default: str) -> tuple[float | None, str]:
        """What is to be run: its microseconds, and the winner's key or the name of the default."""
        times = self.baseline if self.winner is None else self.statistics
        name = default if self.winner is None else self.winner.key
        return times.median_us if times else None, name


def decide(finals: Finals) -> Decision:
    """Choose among the finalists; with none left, cuBLAS stays the answer."""
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
    safe = [i for i in everyone if _is_safe(finals, i)]
    # With none safe, what is told of is preferably one whose power penalty is known: it says why.
    field = (
        safe
        or [i for i in everyone if finals.power_penalties and finals.power_penalties[i]]
        or everyone
    )
    # Where none is safe, some may have taken part in a state that others did not.
    states = [state for state in finals.states if all(state.samples_us[i] for i in field)]
    fastest = min(field, key=lambda i: (_between(finals, states, i), finals.candidates[i].key))
    tied = [i for i in field if i == fastest or _ties(finals, states, i, fastest)]
    chosen = min(tied, key=lambda i: _preference(finals, i))
    measured = [state for state in finals.states if state.samples_us[chosen]]
    state = min(measured, key=lambda state: _speedup(state, chosen))
    return Decision(
        candidate=finals.candidates[chosen],
        use=Use.of(finals.candidates[chosen].kernel) if safe else Use.CUBLAS,
        statistics=summarize(state.samples_us[chosen]),
        baseline=summarize(state.baseline_us) if state.baseline_us else None,
        speedup=_over_cublas(state, chosen),
        correctness=finals.correctness[chosen],
        conditions=state.conditions,
        ties=tuple(finals.candidates[i].key for i in tied if i != chosen),
        power_penalty=finals.power_penalties[chosen] if finals.power_penalties else None,
        regimes=tuple(
            _in_regime(regime, rounds, chosen)
            for regime, rounds in finals.regimes.items()
            if rounds.samples_us[chosen]
        ),
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
                spread=each.spread,
                median_us=each.times_us[chosen],
                default_us=each.default_us,
            )
            for each in finals.spreads
        ),
    )


def verdict(decision: Decision) -> str:
    """A decision in a line of progress."""
    if decision.candidate is None or decision.statistics is None:
        return "no candidate passed; the default is kept"
    gain = f", {decision.speedup.median:.3f} × the default" if decision.speedup else ""
    cost = f", power penalty {decision.power_penalty:.3f}" if decision.power_penalty else ""
    found = f"{decision.candidate.key} {decision.statistics.median_us:.2f} µs{gain}{cost}"
    if decision.winner is None:
        return f"the default stays, before {found}"
    return f"{decision.use}: {found}"


def _in_regime(regime: Regime, rounds: Rounds, i: int) -> InRegime:
    return InRegime(
        regime=regime,
        speedup=_over_cublas(rounds, i),
        median_us=median(rounds.samples_us[i]),
        default_us=median(rounds.baseline_us) if rounds.baseline_us else None,
    )


def _over_cublas(state: Rounds, i: int) -> Ratio | None:
    """Candidate i's speed-up in a state; None where cuBLAS could not be timed."""
    return paired_ratio(state.baseline_us, state.samples_us[i]) if state.baseline_us else None


def _speedup(state: Rounds, i: int) -> float:
    ratio = _over_cublas(state, i)
    return 1.0 if ratio is None else ratio.median


def _is_safe(finals: Finals, i: int) -> bool:
    """Whether candidate i gains on cuBLAS in every state, and more than its power costs between
    them, beyond doubt.

    Between them, because what it costs is of programs at the power limit, and those that are wholly
    at it gain what it gains in the sustained rounds.
    """
    penalty = _penalty(finals, i)
    if penalty is None or not all(state.samples_us[i] for state in finals.states):
        return False
    if not _beats_rivals(finals, i):
        return False
    found = [_over_cublas(state, i) for state in finals.states]
    lows = [ratio.ci_low for ratio in found if ratio is not None]
    return all(low > 1.0 for low in lows) and (not lows or _mean(lows) > penalty)


def _beats_rivals(finals: Finals, i: int) -> bool:
    """Whether candidate i gains on the other ways that any program has, beyond doubt."""
    return all(
        paired_ratio(rival.samples_us, finals.samples_us[i]).ci_low > 1.0
        for rival in finals.rivals
        if rival.is_to_be_beaten
    )


def _penalty(finals: Finals, i: int) -> float | None:
    """What candidate i's time counts in a program; None where nobody knows."""
    return finals.power_penalties[i] if finals.power_penalties else 1.0


def _between(finals: Finals, states: Sequence[Rounds], i: int) -> float:
    """Microseconds between the states: their medians' geometric mean, times its power penalty."""
    times = [median(state.samples_us[i]) for state in states]
    return _mean(times) * (_penalty(finals, i) or 1.0)


def _ties(finals: Finals, states: Sequence[Rounds], i: int, fastest: int) -> bool:
    """Whether candidate i may be as fast as the fastest one between the states.

    Every state weighs alike, however many rounds it has: a kernel that is slower by 4% in one and
    not faster in the others is slower.
    """
    paid = (_penalty(finals, i) or 1.0) / (_penalty(finals, fastest) or 1.0)
    lows = [paired_ratio(state.samples_us[i], state.samples_us[fastest]).ci_low for state in states]
    return _mean(lows) * paid <= 1.0


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return float(prod(values) ** (1 / len(values)))


def _preference(finals: Finals, i: int) -> tuple[bool, int, str]:
    """The fixed order inside a tie: fixed reduction order, smaller workspace, name."""
    candidate = finals.candidates[i]
    return (not candidate.has_fixed_order, finals.workspace_bytes[i], candidate.key)
