"""The finalists of one problem in further regimes of the GPU, after the sustained one.

A winner must beat the default in every regime. So only finalists that did so in all regimes before
take part in the next one, and without any it is skipped: rested, then between other kernels, then
alone, for the power penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

from tuner.measure import company, power
from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.power import gain
from tuner.measure.timing import (
    CLOCK_REPLAY_US,
    FINAL_REPLAY_US,
    LEAST_ROUNDS,
    REST,
    Timer,
    affordable,
    cool_down,
    launches_per_replay,
)
from tuner.measure.torch_calls import captured_beside
from tuner.trial import Rounds

ROUNDS_BUDGET_US = 0.4e6
"""Approximate limit of the time of one regime's rounds; long kernels get fewer of them."""

Blame = Callable[[Sequence[int]], Callable[[int], None]]
"""For the places of finalists, a function that announces the i-th of them, if it exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Further:
    """Results of the regimes after the sustained one; the fields are as in `trial.Finals`."""

    boost: Rounds | None = None
    interleaved: Rounds | None = None
    power_penalties: tuple[float | None, ...] = ()


@dataclass(kw_only=True, slots=True)
class Finalists:
    """The finalist `field[i]` has the samples `sustained.samples_us[i]`; i is its place."""

    bench: Bench
    field: Sequence[Prepared]
    sustained: Rounds
    timer: Timer
    rounds: int
    power_limit_w: float
    seed: int
    blame: Blame

    def further(self) -> Further:
        """All further regimes that have finalists left.

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
        regimes = (self.sustained, rested, interleaved)
        counts = power.is_counted(self.bench.problem.operation) and power.is_power_limited(
            regimes, self.power_limit_w
        )
        penalties = self._penalties(regimes) if counts else ()
        return Further(boost=rested, interleaved=interleaved, power_penalties=penalties)

    def _ahead(self, *regimes: Rounds) -> list[int]:
        return [place for place in range(len(self.field)) if gain(regimes, place)]

    def _rested(self, places: Sequence[int]) -> Rounds:
        """Rounds with as much rest as work."""
        # Half as many as in other regimes: they take four times as long, and their noise is lower
        # because the clock does not move.
        times = self._times(places)
        default_us = times[-1]
        sets = self.bench.set_count
        launches = launches_per_replay(min(times), sets, FINAL_REPLAY_US)
        # An untimed replay of the default goes before each, and the rest is for both. If the
        # default is much slower, its replay would be longer than the timed one: so it has a graph
        # with fewer launches for that.
        fills = launches_per_replay(default_us, sets, FINAL_REPLAY_US)
        round_us = (1 + REST) * (launches * sum(times) + len(times) * fills * default_us)
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
        *samples, baseline_us = taken.samples_us
        rounds = Rounds(
            samples_us=tuple(samples),
            baseline_us=baseline_us,
            conditions=conditions_of(taken.readings),
        )
        return self._placed(places, rounds)

    def _interleaved(self, places: Sequence[int]) -> Rounds:
        *times, default_us = self._times(places)
        # The kernels in between take about as long as the default's product.
        launches = launches_per_replay(2 * default_us, self.bench.set_count, FINAL_REPLAY_US)
        round_us = launches * (sum(times) + (len(times) + 2) * default_us)
        rounds = company.mixed_rounds(
            self.bench,
            self._of(places),
            default_us,
            self.timer,
            affordable(self.rounds, round_us, ROUNDS_BUDGET_US),
            seed=self.seed + 2,
            announce=self.blame(places),
        )
        return self._placed(places, rounds)

    def _penalties(self, regimes: Sequence[Rounds]) -> tuple[float | None, ...]:
        """The power penalties of the best; None for those whose clocks are not measured."""
        penalties: list[float | None] = [None] * len(self.field)
        for place in power.beyond_all_penalties(regimes):
            penalties[place] = 1.0
        if any(penalties):
            return tuple(penalties)
        tiles = [prod(finalist.candidate.kernel.output_tile) for finalist in self.field]
        places = power.to_measure(regimes, tiles)
        if not places:
            return tuple(penalties)
        times = self._times(places)
        sets = self.bench.set_count
        launches = [launches_per_replay(us, sets, CLOCK_REPLAY_US) for us in times]
        with captured_beside(self.bench, self._of(places), launches) as graphs:
            gains = [gain(regimes, place) for place in places]
            free_mhz = regimes[1].conditions.sm_clock_mhz
            measured = power.penalties(
                graphs, gains, free_mhz, self.timer.clock, self.blame(places)
            )
        for place, penalty in zip(places, measured, strict=True):
            penalties[place] = penalty and round(penalty, 4)
        return tuple(penalties)

    def _of(self, places: Sequence[int]) -> list[Prepared]:
        return [self.field[place] for place in places]

    def _times(self, places: Sequence[int]) -> list[float]:
        """Sustained microseconds of these finalists and, last, of the default."""
        times = [median(self.sustained.samples_us[place]) for place in places]
        return [*times, median(self.sustained.baseline_us)]

    def _placed(self, places: Sequence[int], rounds: Rounds) -> Rounds:
        """The samples in the order of all finalists; empty for those that took no part."""
        taken = dict(zip(places, rounds.samples_us, strict=True))
        return Rounds(
            samples_us=tuple(taken.get(place, ()) for place in range(len(self.field))),
            baseline_us=rounds.baseline_us,
            conditions=rounds.conditions,
        )
