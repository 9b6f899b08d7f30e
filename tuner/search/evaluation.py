"""How close search strategies come to the recorded optimum, and in how many trials.

Pure: a recording and the order in which a strategy would try its candidates go in, regrets come
out; nothing is measured. Regret is the share by which the winner found takes longer than the best
candidate recorded, in paired rounds: 0.01 is 1%. The winner is found as a run finds it: the best of
the screening times meet in the finals, whose rounds decide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.devices.base import Contender
from tuner.devices.recording import RecordedProblem, RecordedTrial, Sweep
from tuner.devices.replay import ReplayDevice
from tuner.measure.statistics import paired_ratio
from tuner.search.budget import Budget
from tuner.search.exploration import Field, Proposals
from tuner.search.finals import finalists, hold_finals
from tuner.search.hints import resembling
from tuner.search.promotion import decide
from tuner.search.ranking import Ranker, by_time, predictions

COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of trials after which the winner found so far is judged."""
SEEDS = 20
"""Random orders whose mean stands for knowing nothing."""

Order = list[Candidate]


class Recording:
    """One recorded problem, with what its candidates turned out to be worth."""

    def __init__(self, sweep: Sweep, recorded: RecordedProblem) -> None:
        self.problem = recorded.problem
        self.model: DeviceModel = sweep.header.device
        self.baseline_kernels = recorded.baseline_kernels
        self._environment = sweep.header.environment
        self._baseline_us = median(recorded.baseline_common_us or (0.0,))
        self.candidates = [trial.candidate for trial in recorded.trials]
        self._device = ReplayDevice("recording", [sweep])
        self._trials = {trial.candidate.key: trial for trial in recorded.trials}
        self.times = {
            key: median(trial.common_us) for key, trial in self._trials.items() if trial.common_us
        }
        self._final = {
            key: median(trial.further_us) for key, trial in self._trials.items() if trial.further_us
        }
        deciding = self._final or self.times
        if not deciding:
            raise ValueError(f"nothing was measured of {self.problem}")
        self.optimum = min(deciding, key=lambda key: (deciding[key], key))
        self._won: dict[tuple[str, ...], str] = {}

    def knows(self, candidate: Candidate) -> bool:
        """Whether the candidate was recorded, and ran."""
        return candidate.key in self.times

    @property
    def winner(self) -> Candidate:
        """The candidate that was fastest in the last rounds."""
        return self._trials[self.optimum].candidate

    def speedup(self, tried: Sequence[Candidate]) -> float | None:
        """Over cuBLAS, of the best of those tried; None where that was not recorded."""
        times = [self.times[each.key] for each in tried if self.knows(each)]
        return self._baseline_us / min(times) if times and self._baseline_us else None

    def regret(self, key: str) -> float:
        """Of answering with this candidate; 0 for any that the rounds do not tell from the best."""
        mine, best = self._trials[key], self._trials[self.optimum]
        return max(0.0, _ratio(mine, best) - 1.0)

    def found(self, tried: Sequence[Candidate], budget: Budget) -> str | None:
        """Key of the winner that a run ends with which has screened `tried`; None: nothing ran."""
        measured = by_time([each for each in tried if self.knows(each)], self.times)
        field = finalists(measured, budget.finalists)
        if not field:
            return None
        keys = tuple(each.key for each in field)
        if keys not in self._won:
            contenders = [Contender(candidate=each) for each in field]
            finals = hold_finals(self._device, self.problem, contenders, budget.policy)
            self._won[keys] = (decide(finals).candidate or field[0]).key
        return self._won[keys]

    def halves(self) -> tuple[str, str]:
        """Keys of the winners by the even rounds and by the odd ones of the last."""
        final = {key: self._trials[key].further_us for key in self._final}
        if any(len(samples) < 2 for samples in final.values()) or not final:
            return self.optimum, self.optimum
        even, odd = (
            min(final, key=lambda key: (median(final[key][half::2]), key)) for half in (0, 1)
        )
        return even, odd

    def difference(self, a: str, b: str) -> float:
        """How much longer the slower of two candidates takes, over all rounds."""
        ratio = _ratio(self._trials[a], self._trials[b])
        return max(ratio, 1 / ratio) - 1.0


def _ratio(mine: RecordedTrial, other: RecordedTrial) -> float:
    """Time over the other's, in the most rounds that both have."""
    if mine.further_us and other.further_us:
        return paired_ratio(mine.further_us, other.further_us).median
    return paired_ratio(mine.common_us, other.common_us).median


Strategy = Callable[[Recording], Sequence[Order]]
"""The orders in which a strategy may try a problem's candidates; of several the mean counts."""


def planned(ranker: Ranker, budget: Budget, built: Collection[str] | None = None) -> Strategy:
    """What a tuning run does, without winners of near problems to start from.

    `built`: names of the kernels that need no compiling; None: every kernel.
    """

    def orders(recording: Recording) -> list[Order]:
        predicted = predictions(recording.problem, recording.candidates, recording.model, ranker)
        ranked = by_time(recording.candidates, predicted)
        first = resembling(ranked, recording.baseline_kernels, limit=budget.hints)
        field = Field(order=ranked, predicted=predicted, first=first, built=built)
        tried: Order = []
        plan: Proposals | None = field.plan(budget)
        while plan is not None:
            again = bool(tried)
            for step in (plan.kernels, plan.launches):
                while proposed := step(_times(recording, tried)):
                    tried += proposed
            plan = None if again else field.further(budget, recording.speedup(tried))
        return [tried]

    return orders


def _times(recording: Recording, tried: Sequence[Candidate]) -> dict[str, float]:
    return {each.key: recording.times[each.key] for each in tried if recording.knows(each)}


def predicted_order(ranker: Ranker) -> Strategy:
    """The cost model's order, whatever the trials show."""

    def orders(recording: Recording) -> list[Order]:
        found = recording.candidates
        return [by_time(found, predictions(recording.problem, found, recording.model, ranker))]

    return orders


def shuffled(seeds: int = SEEDS) -> Strategy:
    """Random orders."""

    def orders(recording: Recording) -> list[Order]:
        found = sorted(recording.candidates, key=lambda candidate: candidate.key)
        return [
            random.Random(f"{seed} {recording.problem}").sample(found, len(found))  # noqa: S311
            for seed in range(seeds)
        ]

    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A strategy's regrets: of each problem one figure for each number of trials.

    Attributes:
        trials, kernels: most that one problem took of the strategy's own accord.
    """

    name: str
    counts: tuple[int, ...]
    regrets: dict[Problem, tuple[float, ...]]
    trials: int
    kernels: int

    @property
    def medians(self) -> tuple[float, ...]:
        """Of all problems, by number of trials."""
        return tuple(median(column) for column in zip(*self.regrets.values(), strict=True))

    @property
    def worst(self) -> tuple[float, ...]:
        """Of all problems, by number of trials."""
        return tuple(max(column) for column in zip(*self.regrets.values(), strict=True))


def curve(
    name: str,
    strategy: Strategy,
    recordings: Sequence[Recording],
    budget: Budget,
    counts: Sequence[int] = COUNTS,
) -> Curve:
    """Regret after each number of trials; a strategy that has stopped before keeps its winner.

    Before anything ran, the regret is that of the slowest candidate recorded.
    """
    regrets: dict[Problem, tuple[float, ...]] = {}
    trials = kernels = 0
    for recording in recordings:
        rows = []
        for order in strategy(recording):
            rows.append([_after(recording, order[:count], budget) for count in counts])
            trials = max(trials, len(order))
            kernels = max(kernels, len({candidate.kernel.name for candidate in order}))
        regrets[recording.problem] = tuple(mean(column) for column in zip(*rows, strict=True))
    return Curve(name=name, counts=tuple(counts), regrets=regrets, trials=trials, kernels=kernels)


def _after(recording: Recording, tried: Sequence[Candidate], budget: Budget) -> float:
    key = recording.found(tried, budget)
    if key is None:
        key = max(recording.times, key=lambda key: (recording.times[key], key))
    return recording.regret(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flips:
    """How often noise names the winner: two halves of the last rounds, each with its own.

    Attributes:
        problems: judged.
        differences: by problem, where the winners differ, their difference over all rounds.
    """

    problems: int
    differences: dict[Problem, float]

    @property
    def rate(self) -> float:
        """Share of problems whose halves disagree."""
        return len(self.differences) / self.problems


def flips(recordings: Sequence[Recording]) -> Flips:
    """Winners by the even and the odd rounds, compared."""
    differences = {}
    for recording in recordings:
        even, odd = recording.halves()
        if even != odd:
            differences[recording.problem] = recording.difference(even, odd)
    return Flips(problems=len(recordings), differences=differences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """What the nearest recorded problem's winner is worth here; `regret` None: it is none here."""

    problem: Problem
    neighbour: Problem | None = None
    distance: float | None = None
    regret: float | None = None


def neighbours(recordings: Sequence[Recording], max_distance: float) -> list[Neighbour]:
    """Each problem answered with the winner of the nearest other one whose winner runs here."""
    return [_neighbour(recording, recordings, max_distance) for recording in recordings]


def _neighbour(
    recording: Recording, recordings: Sequence[Recording], max_distance: float
) -> Neighbour:
    problem = recording.problem
    alike: Mapping[Problem, Recording] = {
        other.problem: other
        for other in recordings
        if other.problem != problem
        and other.model.slug == recording.model.slug
        and _kind(other.problem) == _kind(problem)
        and problem.distance(other.problem) <= max_distance
    }
    for near in sorted(alike, key=lambda each: (problem.distance(each), each)):
        winner = alike[near].winner
        if recording.knows(winner):
            return Neighbour(
                problem=problem,
                neighbour=near,
                distance=problem.distance(near),
                regret=recording.regret(winner.key),
            )
    return Neighbour(problem=problem)


def _kind(problem: Problem) -> tuple[str, str, int]:
    return problem.dtype, problem.layout, problem.batch
