"""What to measure next: which kernels, then which of their launches, in one go or in two.

Pure: times go in, candidates come out, and the same times give the same candidates. Kernels come
in waves, since each needs compiling: the first from the cost model alone, the others from the model
corrected by what was measured. Every second kernel brings a tile that was not tried yet, because
where the model is wrong, it is wrong about a tile: of 2304×768×4096 `nt` in BF16 its 18 favourites
share three tiles, all slower by half than the best (NVIDIA H200, 2026-11-21). Launches come in
batches, around the best launch so far of the kernels that did best.

A kernel that is built is measured in milliseconds, any other costs half a minute of compiling
first. So a run tries those that are built and names a winner within seconds. If they were enough to
choose from, a second go compiles others only if that promises something: the default is still
ahead, or the cost model expects a kernel that is clearly faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, log2

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Launch
from tuner.search.budget import Budget
from tuner.search.ranking import by_kernel

# The constants below were chosen on the 22 recorded problems (NVIDIA H200, 2026-11-21), of which
# each is one sample only. With each goes the winner's worst regret at the default effort. It hangs
# on the model: with predictions blurred by 1% for each kernel, the worst of 22 was 4% to 10% in 12
# repetitions, though 92% of the problems stayed within 3% and the median at 0.1%.
_DOUBT = 3.0
"""Measurements that an effect must outweigh to be believed by half. 2.3% (2, 5: 2.3%, 1: 4.3%)."""
_PASSES = 4
"""Rounds of fitting one trait after the other; more change nothing."""
_TURN = 0.02
"""How much slower a kernel counts for each of its launches tried."""
NOISE = 0.005
"""Gain of a batch of launches below which no more are tried. On the recordings a run took 26 trials
instead of 42 at the mean, and no regret was another."""
SOONEST_US = 1e-3
"""Below any real time: a model may predict 0."""

_Trait = tuple[str, object]


class Proposals:
    """The candidates of one run, proposed in turn.

    Each call takes the times of everything measured so far; candidates that failed have no time.
    A run that goes on from recorded trials gets the same proposals as one that was never stopped:
    only times of what this plan proposed before count.

    Args:
        candidates: most promising first.
        predicted: microseconds, by candidate's key.
        first: candidates that lead the first wave, by other evidence than the model's.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        predicted: Mapping[str, float],
        budget: Budget,
        first: Sequence[Candidate] = (),
    ) -> None:
        self._groups = by_kernel(candidates)
        self.budget = budget
        self._waves = iter(budget.waves)
        self._leaders = {name: launches[0] for name, launches in self._groups.items()}
        self._first: dict[str, None] = {}
        for candidate in first:
            name = candidate.kernel.name
            if name in self._groups and name not in self._first:
                self._leaders[name] = candidate
                self._first[name] = None
        self._expected = {
            name: log(max(predicted[leader.key], SOONEST_US))
            for name, leader in self._leaders.items()
        }
        self._taken: list[str] = []
        self._proposed: dict[str, Candidate] = {}
        self._best_us: float | None = None  # as of the last batch of launches

    @property
    def most_kernels(self) -> int:
        return min(self.budget.kernels, len(self._groups))

    def kernels(self, times: Mapping[str, float]) -> list[Candidate]:
        """The next wave, each kernel with its most promising launch; empty: no more kernels."""
        room = min(next(self._waves, 0), self.budget.trials - len(self._proposed))
        left = [name for name in self._groups if name not in self._taken]
        if room < len(left):
            left = self._chosen(left, times, room)
        self._taken += left
        return self._propose(self._leaders[name] for name in left)

    def launches(self, times: Mapping[str, float]) -> list[Candidate]:
        """The next batch of launches of the kernels proposed so far.

        Empty once a batch has gained less than the noise.
        """
        room = self.budget.trials - len(self._proposed)
        left = [
            candidate
            for name in self._taken
            for candidate in self._groups[name]
            if candidate.key not in self._proposed
        ]
        if room >= len(left):  # as in an exhaustive run: nothing to choose
            return self._propose(left)
        # `before` is None in the first call, so the first batch is always tried.
        before = self._best_us
        self._best_us = min((times[k] for k in self._proposed if k in times), default=None)
        if before and self._best_us and self._best_us > before * (1 - NOISE):
            return []
        return self._propose(self._around(times, min(room, self.budget.batch)))

    def _propose(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        proposed = {candidate.key: candidate for candidate in candidates}
        self._proposed |= proposed
        return list(proposed.values())

    def _chosen(self, left: list[str], times: Mapping[str, float], room: int) -> list[str]:
        """`room` of the kernels: those of `first`, then the best expected and new tiles in turn."""
        chosen = [name for name in self._first if name in left][:room]
        # How much slower than expected each measured kernel was, as a logarithm: traits that the
        # slow ones share count against the kernels that are left.
        residuals = {
            name: log(times[key]) - self._expected[name]
            for name in self._taken
            if (key := self._leaders[name].key) in times
        }
        effects = _effects({self._kernel(name): value for name, value in residuals.items()})
        rest = [name for name in left if name not in chosen]
        rest.sort(key=lambda name: self._expected[name] + _shift(effects, self._kernel(name)))
        tiles = {self._tile(name) for name in (*self._taken, *chosen)}
        for turn in range(room - len(chosen)):
            pick = rest[0]
            if turn % 2:  # every second one brings a new tile, if there is one
                pick = next((name for name in rest if self._tile(name) not in tiles), pick)
            rest.remove(pick)
            tiles.add(self._tile(pick))
            chosen.append(pick)
        return chosen

    def _around(self, times: Mapping[str, float], room: int) -> Iterator[Candidate]:
        """Launches nearest to the best ones, of the better kernels sooner and more of them."""
        best: dict[str, tuple[float, str]] = {}
        turns: dict[str, int] = {}
        for key, candidate in self._proposed.items():
            name = candidate.kernel.name
            turns[name] = turns.get(name, 0) + 1
            if key in times:
                best[name] = min(best.get(name, (times[key], key)), (times[key], key))
        if not best:
            return
        # Kernels whose best launch is far behind get no more launches.
        limit = min(best.values())[0] * self.budget.policy.give_up_ratio
        left = {
            name: self._nearest(name, self._proposed[key].launch)
            for name, (time, key) in best.items()
            if time <= limit
        }
        for _ in range(room):
            names = [name for name, launches in left.items() if launches]
            if not names:
                return
            # A kernel counts as slower with each launch tried: so all good ones get their turn.
            name = min(names, key=lambda name: (best[name][0] * (1 + _TURN * turns[name]), name))
            turns[name] += 1
            yield left[name].pop(0)

    def _nearest(self, name: str, launch: Launch) -> list[Candidate]:
        """The kernel's launches that were not proposed yet, most like `launch` first."""
        left = [c for c in self._groups[name] if c.key not in self._proposed]
        return sorted(left, key=lambda c: launch_distance(launch, c.launch))  # stable

    def _kernel(self, name: str) -> AnyKernel:
        return self._leaders[name].kernel

    def _tile(self, name: str) -> tuple[int, int]:
        return self._kernel(name).output_tile


def launch_distance(a: Launch, b: Launch) -> float:
    """How many steps apart two launches of a kernel are: 1 for each choice that is the next one.

    Half or twice as many splits come before the numbers between: the octave matters most.
    """
    octaves = abs(log2(a.splits / b.splits))
    return (
        (a.raster is not b.raster)
        + (a.decomposition is not b.decomposition)
        + (a.sm_budget != b.sm_budget)
        + abs(log2(a.swizzle / b.swizzle))
        + (octaves if octaves.is_integer() else 1 + octaves)
    )


def _effects(residuals: Mapping[AnyKernel, float]) -> dict[_Trait, float]:
    """How much slower than expected each trait makes a kernel, as a logarithm.

    An additive model fitted trait by trait (backfitting: Hastie and Tibshirani 1990, section 4.4),
    each effect shrunk towards 0 the fewer kernels show it. The kernels' common deviation, the
    mean, is left out.
    """
    if not residuals:
        return {}
    mean = sum(residuals.values()) / len(residuals)
    rows = [(kernel.choices, value - mean) for kernel, value in residuals.items()]
    effects: dict[_Trait, float] = {}
    for _ in range(_PASSES):
        for place in range(len(rows[0][0])):
            # What other traits' effects do not explain is attributed to the trait in this place.
            unexplained: dict[_Trait, list[float]] = {}
            for traits, value in rows:
                others = (effects.get(trait, 0.0) for trait in traits if trait != traits[place])
                unexplained.setdefault(traits[place], []).append(value - sum(others))
            for trait, values in unexplained.items():
                effects[trait] = sum(values) / (len(values) + _DOUBT)
    return effects


def _shift(effects: Mapping[_Trait, float], kernel: AnyKernel) -> float:
    return sum(effects.get(trait, 0.0) for trait in kernel.choices)


GAIN = 0.05
"""How much faster a kernel must be expected to be than every built one to be compiled. Half of the
model's median error: on an NVIDIA H200 a second go for less than that gained nothing in five of
five unseen problems (2026-11-21)."""

BEHIND = 0.02
"""How far the default must be ahead of the built kernels for a second go at all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """The candidates of a problem.

    Attributes:
        order: most promising first.
        predicted: microseconds, by candidate's key.
        first: candidates to begin with, by other evidence than the cost model's.
        built: names of kernels that need no compiling; None if compiling is not needed at all.
    """

    order: Sequence[Candidate]
    predicted: Mapping[str, float]
    first: Sequence[Candidate] = ()
    built: Collection[str] | None = None

    def plan(self, budget: Budget) -> Proposals:
        """The first go: what needs no compiling. Without any such kernel it proposes nothing."""
        if self.built is None:
            return self._plan(self.order, budget)
        return self._plan(self._here(), budget)

    def further(self, budget: Budget, speedup: float | None) -> Proposals | None:
        """The second go, among the kernels that are not built; None if it promises no gain.

        Where enough kernels are built for an answer, `budget.further` kernels are compiled if they
        promise a gain; else those of the `budget.cold` most promising that are not built.

        Args:
            budget: the run's.
            speedup: of the first go's winner over the default; None if unknown.
        """
        if self.built is None:
            return None
        others = [c for c in self.order if c.kernel.name not in self.built]
        if not self._suffices(budget):
            names = {c.kernel.name for c in self.favourites(budget)} - set(self.built)
            return self.among(names, budget) if names else None
        best_us = self.predicted[self._here()[0].key]
        behind = speedup is not None and speedup < 1 - BEHIND
        if not behind:
            others = [c for c in others if self.predicted[c.key] < best_us]
        if budget.further == 0 or not others:
            return None
        if not behind and self.predicted[others[0].key] * (1 + GAIN) >= best_us:
            return None
        more = replace(budget, waves=(budget.further,), trials=2 * budget.further)
        return self._plan(others, more)

    def favourites(self, budget: Budget) -> list[Candidate]:
        """The first launches of the kernels that a run needs, as far as the model alone knows.

        Those of the first go if enough kernels are built, else the `budget.cold` most promising.
        """
        if not self._suffices(budget):
            return self._plan(self.order, budget.in_one_wave(budget.cold)).kernels({})
        plan, chosen = self.plan(budget), list[Candidate]()
        while wave := plan.kernels({}):  # as if every candidate took the predicted time
            chosen += wave
        return chosen

    def among(self, names: Collection[str], budget: Budget) -> Proposals:
        """A go among the kernels of these names, all at once."""
        candidates = [c for c in self.order if c.kernel.name in names]
        return self._plan(candidates, replace(budget, waves=(len(names),)))

    def _suffices(self, budget: Budget) -> bool:
        """Whether enough kernels are built to choose among them; an exhaustive run needs all."""
        kernels = by_kernel(self.order)
        ready = sum(name in (self.built or ()) for name in kernels)
        return budget.kernels <= ready

    def _here(self) -> list[Candidate]:
        return [c for c in self.order if c.kernel.name in (self.built or ())]

    def _plan(self, candidates: Sequence[Candidate], budget: Budget) -> Proposals:
        return Proposals(candidates, self.predicted, budget, self.first)
