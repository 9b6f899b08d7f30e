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

import torch

from tuner.measure import power
from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.graphs import TorchGraph
from tuner.measure.power import gain
from tuner.measure.timing import (
    CLOCK_REPLAY_US,
    FINAL_REPLAY_US,
    LEAST_ROUNDS,
    REST,
    Timer,
    affordable,
    brief_us,
    cool_down,
    launches_per_replay,
)
from tuner.measure.torch_calls import captured_beside
from tuner.trial import InSpread, Rounds
from tuner.workloads.operands import OperandSet

ROUNDS_BUDGET_US = 0.4e6
"""Approximate limit of the time of one regime's rounds; long kernels get fewer of them."""

LEAST_SHARE = 0.01
"""Between other kernels, a contender's time is at least this share of the default's: noise could
make it negative."""

_SIGN = 0x80

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

    def by_spread(self) -> tuple[InSpread, ...]:
        """Medians of a grouped problem on the sets of each spread of tokens alone, in their order.

        A winner is chosen over all spreads together; these times show on which spreads it wins.
        They take a few sustained rounds of their own and have no part in the decision. Empty
        without groups, or without finalists.

        Raises:
            CandidateFailed, ContextDead
        """
        sets: dict[str, list[int]] = {}
        for i, operands in enumerate(self.bench.operands.sets if self.field else ()):
            if operands.groups is not None:
                sets.setdefault(operands.groups.spread, []).append(i)
        return tuple(self._within(spread, over) for spread, over in sets.items())

    def _within(self, spread: str, over: list[int]) -> InSpread:
        places = range(len(self.field))
        times = self._times(places)
        launches = launches_per_replay(min(times), len(over), FINAL_REPLAY_US)
        rounds = min(self.rounds, LEAST_ROUNDS)
        counts = [launches] * len(times)
        with captured_beside(self.bench, self.field, counts, over=over) as graphs:
            taken = self.timer.rounds(
                graphs,
                affordable(rounds, launches * sum(times), ROUNDS_BUDGET_US),
                seed=self.seed,
                announce=self.blame(places),
            )
        *finalists_us, default_us = map(median, taken.samples_us)
        return InSpread(spread=spread, times_us=tuple(finalists_us), default_us=default_us)

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
        rounds = mixed_rounds(
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


def mixed_rounds(
    bench: Bench,
    contenders: Sequence[Prepared],
    baseline_us: float,
    timer: Timer,
    count: int,
    *,
    seed: int,
    announce: Callable[[int], None],
) -> Rounds:
    """`count` shuffled rounds of the contenders and the default, each between passes over memory.

    If launches of one kernel follow each other, the prologue of one may overlap with the last wave
    of the other, and operands are in L2 as that kernel leaves them. Between other kernels this is
    not so: of 65536×128×512 in FP8 the winner of such rounds is 10% faster than cuBLAS's kernel,
    but 8% slower between passes over memory (NVIDIA H200, 2026-11-22). So each contender is also
    timed with elementwise passes over operands after each launch, which take about as long as the
    product itself. Its time is the default's, plus what the whole takes longer than with the
    default's product.

    `baseline_us` is the time of the default's product; `announce` is as in `Timer.rounds`, with the
    default last. The operands are changed: nothing can be verified with them afterwards.

    Raises:
        CandidateFailed, ContextDead
    """
    sets = bench.operands.sets
    one_pass = TorchGraph(bench.stream, len(sets), lambda i: _pass_over(sets[i]))
    pass_us = brief_us(timer, one_pass)
    passes = max(1, round(baseline_us / pass_us))

    def others(i: int) -> None:
        for j in range(passes):
            _pass_over(sets[(i * passes + j) % len(sets)])

    launches = launches_per_replay(baseline_us + passes * pass_us, len(sets), FINAL_REPLAY_US)
    counts = [launches] * (len(contenders) + 1)
    with captured_beside(bench, contenders, counts, others) as graphs:
        taken = timer.rounds(graphs, count, seed=seed, announce=announce)
    *wholes, default_wholes = taken.samples_us
    least = LEAST_SHARE * baseline_us
    return Rounds(
        samples_us=tuple(
            tuple(
                max(least, baseline_us + whole - default_whole)
                for whole, default_whole in zip(samples, default_wholes, strict=True)
            )
            for samples in wholes
        ),
        baseline_us=(baseline_us,) * len(default_wholes),
        conditions=conditions_of(taken.readings),
    )


def _pass_over(operands: OperandSet) -> None:
    """Read and write all of a set, elementwise: only the signs change."""
    for x in (operands.a, operands.b, operands.d):
        if x.is_floating_point() and x.dtype.itemsize == 1:
            x.view(torch.uint8).bitwise_xor_(_SIGN)
        else:
            x.neg_()
