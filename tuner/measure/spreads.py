"""Times of the finalists of a grouped problem for each spread of tokens alone.

A winner is chosen over all spreads together; these times show on which spreads it wins. They take
a few sustained rounds of their own and have no part in the decision.
"""

from __future__ import annotations

from statistics import median

from tuner.measure.regimes import ROUNDS_BUDGET_US, Finalists
from tuner.measure.timing import FINAL_REPLAY_US, LEAST_ROUNDS, affordable, launches_per_replay
from tuner.measure.torch_calls import captured_beside
from tuner.trial import InSpread


def by_spread(finalists: Finalists) -> tuple[InSpread, ...]:
    """Medians by spread, in the order of the sets; empty without groups, or without finalists.

    Raises:
        CandidateFailed, ContextDead
    """
    if not finalists.field:
        return ()
    sets: dict[str, list[int]] = {}
    for i, operands in enumerate(finalists.bench.operands.sets):
        if operands.groups is not None:
            sets.setdefault(operands.groups.spread, []).append(i)
    return tuple(_within(finalists, spread, over) for spread, over in sets.items())


def _within(finalists: Finalists, spread: str, over: list[int]) -> InSpread:
    sustained = finalists.sustained
    times = [median(samples) for samples in (*sustained.samples_us, sustained.baseline_us)]
    launches = launches_per_replay(min(times), len(over), FINAL_REPLAY_US)
    rounds = min(finalists.rounds, LEAST_ROUNDS)
    counts = [launches] * len(times)
    with captured_beside(finalists.bench, finalists.field, counts, over=over) as graphs:
        taken = finalists.timer.rounds(
            graphs,
            affordable(rounds, launches * sum(times), ROUNDS_BUDGET_US),
            seed=finalists.seed,
            announce=finalists.blame(range(len(finalists.field))),
        )
    *finalists_us, default_us = map(median, taken.samples_us)
    return InSpread(spread=spread, times_us=tuple(finalists_us), default_us=default_us)
