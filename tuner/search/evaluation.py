"""How close search strategies come to the recorded optimum, and in how many trials.

Pure: a recording and the order in which a strategy would try its candidates go in, regrets come
out; nothing is measured. Regret is the share by which the winner takes longer than the best
candidate recorded, in paired rounds: 0.01 is 1%. The winner is chosen as in a run: the best of the
screening times meet in the finals, whose rounds decide.
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
from tuner.search.exploration import Proposals
from tuner.search.finals import finalists, hold_finals
from tuner.search.hints import field_of
from tuner.search.promotion import decide
from tuner.search.ranking import by_time, predictions

COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of trials after which the winner so far is judged."""
SEEDS = 20
"""Random orders, whose mean is the result of a strategy without any knowledge."""

Order = list[Candidate]


class Recording:
    """One recorded problem and the times of its candidates."""

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
        return candidate.key in self.times

    @property
    def winner(self) -> Candidate:
        return self._trials[self.optimum].candidate

    def speedup(self, tried: Sequence[Candidate]) -> float | None:
        """Of the best candidate tried, over the default; None if either was not recorded."""
        times = [self.times[candidate.key] for candidate in tried if self.knows(candidate)]
        return self._baseline_us / min(times) if times and self._baseline_us else None

    def regret(self, key: str) -> float:
        """Of answering with this candidate; 0 if the rounds show no difference from the best."""
        return max(0.0, _ratio(self._trials[key], self._trials[self.optimum]) - 1.0)

    def winner_of(self, tried: Sequence[Candidate], budget: Budget) -> str | None:
        """Key of the winner of a run that has screened `tried`; None if none of them ran."""
        measured = by_time([c for c in tried if self.knows(c)], self.times)
        chosen = finalists(measured, budget.finalists)
        if not chosen:
            return None
        keys = tuple(candidate.key for candidate in chosen)
        if keys not in self._won:
            contenders = [Contender(candidate=candidate) for candidate in chosen]
            finals = hold_finals(self._device, self.problem, contenders, budget.policy)
            self._won[keys] = (decide(finals).candidate or chosen[0]).key
        return self._won[keys]

    def halves(self) -> tuple[str, str]:
        """Keys of the winners by the even and by the odd rounds of the finals."""
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
    """The time over the other's, in the largest set of rounds that both have."""
    if mine.further_us and other.further_us:
        return paired_ratio(mine.further_us, other.further_us).median
    return paired_ratio(mine.common_us, other.common_us).median


Strategy = Callable[[Recording], Sequence[Order]]
"""The orders in which a strategy may try a problem's candidates; the mean over them counts."""


def planned(budget: Budget, built: Collection[str] | None = None) -> Strategy:
    """The order of a tuning run without winners of near problems to begin with.

    `built`: names of the kernels that need no compiling; None for all kernels.
    """

    def orders(recording: Recording) -> list[Order]:
        predicted = predictions(recording.problem, recording.candidates, recording.model)
        default = recording.baseline_kernels
        field = field_of(recording.candidates, predicted, budget, default=default, built=built)
        tried: Order = []

        def go(plan: Proposals) -> None:
            for step in (plan.kernels, plan.launches):
                while proposed := step(_times(recording, tried)):
                    tried.extend(proposed)

        go(field.plan(budget))
        if (further := field.further(budget, recording.speedup(tried))) is not None:
            go(further)
        return [tried]

    return orders


def _times(recording: Recording, tried: Sequence[Candidate]) -> dict[str, float]:
    return {c.key: recording.times[c.key] for c in tried if recording.knows(c)}


def predicted_order(recording: Recording) -> list[Order]:
    """The cost model's order, whatever the trials show; a `Strategy`."""
    candidates = recording.candidates
    return [by_time(candidates, predictions(recording.problem, candidates, recording.model))]


def shuffled(seeds: int = SEEDS) -> Strategy:
    """Random orders."""

    def orders(recording: Recording) -> list[Order]:
        ordered = sorted(recording.candidates, key=lambda candidate: candidate.key)
        return [
            random.Random(f"{seed} {recording.problem}").sample(ordered, len(ordered))  # noqa: S311
            for seed in range(seeds)
        ]

    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A strategy's regrets: for each problem a figure for each number of trials.

    Attributes:
        trials, kernels: the most that the strategy took for a problem before it stopped.
    """

    name: str
    counts: tuple[int, ...]
    regrets: dict[Problem, tuple[float, ...]]
    trials: int
    kernels: int

    @property
    def medians(self) -> tuple[float, ...]:
        return tuple(median(column) for column in zip(*self.regrets.values(), strict=True))

    @property
    def worst(self) -> tuple[float, ...]:
        return tuple(max(column) for column in zip(*self.regrets.values(), strict=True))


def curve(
    name: str,
    strategy: Strategy,
    recordings: Sequence[Recording],
    budget: Budget,
    counts: Sequence[int] = COUNTS,
) -> Curve:
    """Regret after each number of trials; a strategy that has stopped before keeps its winner.

    Until a candidate ran, the regret is that of the slowest candidate recorded.
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
    key = recording.winner_of(tried, budget)
    if key is None:
        key = max(recording.times, key=lambda key: (recording.times[key], key))
    return recording.regret(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flips:
    """How often noise decides: the winners of two halves of the finals' rounds, compared.

    Attributes:
        problems: how many were compared.
        differences: of the problems whose winners differ, their difference over all rounds.
    """

    problems: int
    differences: dict[Problem, float]

    @property
    def rate(self) -> float:
        return len(self.differences) / self.problems


def flips(recordings: Sequence[Recording]) -> Flips:
    """The winners by the even and by the odd rounds, compared."""
    differences = {}
    for recording in recordings:
        even, odd = recording.halves()
        if even != odd:
            differences[recording.problem] = recording.difference(even, odd)
    return Flips(problems=len(recordings), differences=differences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """The nearest recorded problem and the regret of its winner here; None if there is no such."""

    problem: Problem
    neighbour: Problem | None = None
    distance: float | None = None
    regret: float | None = None


def neighbours(recordings: Sequence[Recording], max_distance: float) -> list[Neighbour]:
    """Each problem, answered with the winner of the nearest other one whose winner runs here."""
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
    for near in sorted(alike, key=lambda other: (problem.distance(other), other)):
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
