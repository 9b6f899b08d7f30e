"""The finalists of one problem in further regimes of the GPU, after the sustained one.

A winner must gain on cuBLAS in every state. So each state is only for those that are ahead in all
before it, and where nobody is, it does not take place: rested, then between other kernels, then
alone, for the power penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from tuner.measure import company, power
from tuner.measure.baseline import captured_beside
from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.power import gain
from tuner.measure.timing import (
    FINAL_REPLAY_US,
    LEAST_ROUNDS,
    LOOK_REPLAY_US,
    REST,
    Timer,
    affordable,
    cool_down,
    launches_per_replay,
)
from tuner.trial import Rounds

ROUNDS_BUDGET_US = 0.4e6
"""The rounds of one state take at most about this long; long kernels get fewer of them."""

Blame = Callable[[Sequence[int]], Callable[[int], None]]
"""For the places of finalists: what announces the i-th of them, and nobody beyond the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Further:
    """What came of the states after the sustained one; the fields are as in `trial.Finals`."""

    boost: Rounds | None = None
    interleaved: Rounds | None = None
    power_penalties: tuple[float | None, ...] = ()


@dataclass(kw_only=True, slots=True)
class Finalists:
    """`field[i]` is the finalist whose samples are `sustained.samples_us[i]`; i is its place."""

    bench: Bench
    field: Sequence[Prepared]
    sustained: Rounds
    timer: Timer
    rounds: int
    power_limit_w: float
    seed: int
    blame: Blame

    def further(self) -> Further:
        """All further states that somebody is left for.

        Raises:
            CandidateFailed, ContextDead
        """
        ahead = self._ahead(self.sustained)
        if not ahead:
            return Further()
        rested = self._rested(ahead)
        ahead = self._ahead(self.sustained, rested)
        if not ahead:
            return Further(boost=rested)
        interleaved = self._interleaved(ahead)
        states = (self.sustained, rested, interleaved)
        counts = power.is_counted(self.bench.problem.operation) and power.is_power_limited(
            states, self.power_limit_w
        )
        penalties = self._penalties(states) if counts else ()
        return Further(boost=rested, interleaved=interleaved, power_penalties=penalties)

    def _ahead(self, *states: Rounds) -> list[int]:
        return [place for place in range(len(self.field)) if gain(states, place)]

    def _rested(self, places: Sequence[int]) -> Rounds:
        """As much rest as work. Half as many rounds as elsewhere: they take four times as long, and
        tell as much, at a clock that stands still.
        """
        times = self._times(places)
        stock = times[-1]
        sets = self.bench.set_count
        launches = launches_per_replay(min(times), sets, FINAL_REPLAY_US)
        # An untimed replay of cuBLAS's goes before each, and both are rested from. Where cuBLAS is
        # slower by far, it would take longer than what is timed, so it has launches of its own.
        fills = launches_per_replay(stock, sets, FINAL_REPLAY_US)
        round_us = (1 + REST) * (launches * sum(times) + len(times) * fills * stock)
        half = max(self.rounds // 2 + 1, min(self.rounds, LEAST_ROUNDS))
        count = affordable(half, round_us, ROUNDS_BUDGET_US)
        counts = [*[launches] * len(times), fills]
        with captured_beside(self.bench, self._of(places), counts) as (*graphs, filler):
            cool_down()
            taken = self.timer.rounds(
                graphs,
                count,
                seed=self.seed + 1,
                announce=self.blame(places),
                rest=REST,
                filler=filler,
            )
        *samples, reference = taken.samples_us
        rounds = Rounds(
            samples_us=tuple(samples),
            baseline_us=reference,
            conditions=conditions_of(taken.readings),
        )
        return self._placed(places, rounds)

    def _interleaved(self, places: Sequence[int]) -> Rounds:
        *mine, stock = self._times(places)
        # What is between takes about as long as cuBLAS's product.
        launches = launches_per_replay(2 * stock, self.bench.set_count, FINAL_REPLAY_US)
        round_us = launches * (sum(mine) + (len(mine) + 2) * stock)
        rounds = company.mixed_rounds(
            self.bench,
            self._of(places),
            stock,
            self.timer,
            affordable(self.rounds, round_us, ROUNDS_BUDGET_US),
            seed=self.seed + 2,
            announce=self.blame(places),
        )
        return self._placed(places, rounds)

    def _penalties(self, states: Sequence[Rounds]) -> tuple[float | None, ...]:
        """What the power of the best costs; None for those whose clocks are not looked at."""
        found: list[float | None] = [None] * len(self.field)
        for place in power.beyond_all_prices(states):
            found[place] = 1.0
        if any(found):
            return tuple(found)
        tiles = [prod(finalist.candidate.kernel.output_tile) for finalist in self.field]
        places = power.worth_a_look(states, tiles)
        if not places:
            return tuple(found)
        times = self._times(places)
        sets = self.bench.set_count
        launches = [launches_per_replay(us, sets, LOOK_REPLAY_US) for us in times]
        with captured_beside(self.bench, self._of(places), launches) as graphs:
            gains = [gain(states, place) for place in places]
            free_mhz = states[1].conditions.sm_clock_mhz
            paid = power.penalties(graphs, gains, free_mhz, self.timer.clock, self.blame(places))
        for place, penalty in zip(places, paid, strict=True):
            found[place] = penalty and round(penalty, 4)
        return tuple(found)

    def _of(self, places: Sequence[int]) -> list[Prepared]:
        return [self.field[place] for place in places]

    def _times(self, places: Sequence[int]) -> list[float]:
        """Sustained microseconds of these finalists and, last, of cuBLAS."""
        mine = [median(self.sustained.samples_us[place]) for place in places]
        return [*mine, median(self.sustained.baseline_us)]

    def _placed(self, places: Sequence[int], rounds: Rounds) -> Rounds:
        """The samples in the order of all finalists: who took no part has none."""
        taken = dict(zip(places, rounds.samples_us, strict=True))
        return Rounds(
            samples_us=tuple(taken.get(place, ()) for place in range(len(self.field))),
            baseline_us=rounds.baseline_us,
            conditions=rounds.conditions,
        )
