"""What a library itself has for a problem: its own list, then what lies near the best of it.

A library's kernels are compiled already, so each costs milliseconds, and no model ranks them. Only
the device can name them (`Device.proposals`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from tuner.backends.cublaslt.algorithms import kernel_for
from tuner.devices.base import Contender, Device
from tuner.search.budget import Budget
from tuner.search.exploration import NOISE
from tuner.search.packs import RunPacks
from tuner.trial import Trial

Leaders = Callable[[], Sequence[Trial]]
"""The measured trials so far, fastest first."""


def library_kernel(problem: Problem, device: Device) -> CublasLtKernel | None:
    """The library's kernel for the problem; None where the device has no library, or no kernel."""
    if device.replayed or not device.needs_packs:
        return None
    return kernel_for(problem, device.model.arch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The batches of one run. `tried` has the keys of candidates that were measured before."""

    problem: Problem
    kernel: CublasLtKernel
    device: Device
    packs: RunPacks
    budget: Budget
    tried: Container[str]

    def batches(self, leaders: Leaders) -> Iterator[list[Contender]]:
        """What to measure next, decided as the times come in."""
        entrant = self.packs.contender(Candidate(kernel=self.kernel))
        measured = 0
        for start, most in self._rounds(leaders):
            # Neighbours of one are neighbours of the next: ask for more than are measured.
            found = self.device.proposals(self.problem, entrant, start=start, most=most + measured)
            fresh = [each for each in found if each.key not in self.tried][:most]
            measured += len(fresh)
            yield [self.packs.as_built(candidate) for candidate in fresh]

    def _rounds(self, leaders: Leaders) -> Iterator[tuple[Algorithm | None, int]]:
        """Where to begin, and how many algorithms to measure.

        First the library's own list. Then, as long as that brings something, neighbours of the
        fastest so far, which is coordinate descent with a few coordinates at a time.
        """
        yield None, self.budget.library
        before: float | None = None
        for _ in range(0, self.budget.variants, self.budget.batch):
            mine = [trial for trial in leaders() if trial.candidate.kernel == self.kernel]
            if not mine or mine[0].statistics is None:
                return
            start, best = mine[0].candidate.launch.algorithm, mine[0].statistics.median_us
            if start is UNSET or (before is not None and best > before * (1 - NOISE)):
                return
            before = best
            yield start, self.budget.batch
