"""What a tuning run chooses from, and in how many goes it does so.

Pure. A kernel that is built is measured in milliseconds, one that is not costs half a minute of
compiling first. So where enough kernels are built, a run tries those and names a winner within
seconds. A second go compiles others only where that promises something: cuBLAS is still ahead, or
the cost model expects a kernel that is clearly faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmsmith.core.candidate import Candidate
from tuner.search.budget import Budget
from tuner.search.exploration import Proposals
from tuner.search.ranking import by_kernel

GAIN = 0.05
"""How much faster a kernel must be expected to be than every built one to be compiled. Half of the
model's median error: on an NVIDIA H200 a second go for less than that found nothing in five of five
unseen problems (2026-11-21)."""

BEHIND = 0.02
"""How far cuBLAS must be ahead of the built kernels for a second look at whatever is not built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """The candidates of a problem.

    Attributes:
        order: most promising first.
        predicted: microseconds, by candidate's key.
        first: candidates to begin with, by other evidence than the cost model's.
        built: names of kernels that need no compiling; None: compiling is not needed at all.
    """

    order: Sequence[Candidate]
    predicted: Mapping[str, float]
    first: Sequence[Candidate] = ()
    built: Collection[str] | None = None

    def plan(self, budget: Budget) -> Proposals:
        """The first go: what is built, if that is enough for an answer, else all there is."""
        if self.built is None or self._all_built():
            return self._plan(self.order, budget)
        if self._suffices(budget):
            return self._plan(self._here(), budget)
        # Nothing worth an answer is there yet, and somebody waits for the compilers.
        return self._plan(self.order, budget.in_one_wave(budget.cold))

    def further(self, budget: Budget, speedup: float | None) -> Proposals | None:
        """The second go, among what is not built; None: nothing is to be expected of one.

        Args:
            budget: the run's; `further` of it are compiled.
            speedup: of the first go's winner over cuBLAS; None: not known.
        """
        if self.built is None or self._all_built() or not self._suffices(budget):
            return None
        best = self.predicted[self._here()[0].key]
        behind = speedup is not None and speedup < 1 - BEHIND
        others = [
            candidate
            for candidate in self.order
            if candidate.kernel.name not in self.built
            and (behind or self.predicted[candidate.key] < best)
        ]
        if budget.further == 0 or not others:
            return None
        if not behind and self.predicted[others[0].key] * (1 + GAIN) >= best:
            return None
        more = replace(budget, waves=(budget.further,), trials=2 * budget.further)
        return self._plan(others, more)

    def _all_built(self) -> bool:
        return all(candidate.kernel.name in (self.built or ()) for candidate in self.order)

    def _suffices(self, budget: Budget) -> bool:
        """Whether a choice among the built kernels is one; an exhaustive run chooses nothing."""
        kernels = by_kernel(self.order)
        ready = sum(name in (self.built or ()) for name in kernels)
        return budget.kernels <= ready and budget.kernels < len(kernels)

    def _here(self) -> list[Candidate]:
        return [each for each in self.order if each.kernel.name in (self.built or ())]

    def _plan(self, candidates: Sequence[Candidate], budget: Budget) -> Proposals:
        return Proposals(candidates, self.predicted, budget, self.first)
