"""What a tuning run chooses from, and in how many goes it does so.

Pure. A kernel that is built is measured in milliseconds, one that is not costs half a minute of
compiling first. So where enough kernels are built, a run tries those, names a winner within
seconds, and compiles others only where the cost model expects them to be clearly faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmsmith.launch import Candidate
from tuner.search.budget import Budget
from tuner.search.exploration import Plan
from tuner.search.ranking import by_kernel

GAIN = 0.02
"""How much faster a kernel must be expected to be than every built one to be worth compiling.

With `gemmsmith compile --base` built and a model that had not seen the problem, 16 of 22 recorded
problems stayed under it, and lost 0.9% at most; the four that lost 4% and more were above it
(NVIDIA H200, 2026-11-21)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """The candidates of a problem.

    Attributes:
        order: most promising first.
        predicted: microseconds, by candidate's key.
        first: candidates to begin with, by other evidence than the cost model's.
    """

    order: Sequence[Candidate]
    predicted: Mapping[str, float]
    first: Sequence[Candidate] = ()

    def plans(self, budget: Budget, built: Collection[str] | None) -> list[Plan]:
        """What to measure, a plan for each winner to be named, the last one the final answer.

        Args:
            budget: of each plan; the second one's is smaller.
            built: names of kernels that need no compiling; None: compiling is not needed at all.
        """
        kernels = by_kernel(self.order)
        ready = [] if built is None else [name for name in kernels if name in built]
        if built is None or len(ready) == len(kernels):
            return [self._plan(self.order, budget)]
        if len(ready) < budget.kernels or budget.kernels >= len(kernels):
            # Nothing worth an answer is there yet: compile all the run may, side by side.
            return [self._plan(self.order, budget.in_one_wave())]
        here = [candidate for candidate in self.order if candidate.kernel.name in built]
        first = self._plan(here, budget)
        further = self._worth_compiling(here[0], built)
        if not further or budget.further == 0:
            return [first]
        more = replace(budget, waves=(budget.further,), trials=2 * budget.further)
        return [first, self._plan(further, more)]

    def _worth_compiling(self, best: Candidate, built: Collection[str]) -> list[Candidate]:
        """Candidates that are not built and expected before `best`, if any is so by far."""
        limit = self.predicted[best.key]
        sooner = [
            candidate
            for candidate in self.order
            if candidate.kernel.name not in built and self.predicted[candidate.key] < limit
        ]
        return sooner if sooner and self.predicted[sooner[0].key] * (1 + GAIN) < limit else []

    def _plan(self, candidates: Sequence[Candidate], budget: Budget) -> Plan:
        return Plan(candidates, self.predicted, budget, self.first)
