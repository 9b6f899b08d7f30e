"""What a tuning run may choose from: recorded or enumerated candidates, and a library's own.

A library's kernels are compiled already, so each costs milliseconds, and no model ranks them. Only
the device can name them (`Device.proposals`): first the library's own list, then what lies near the
best of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CublasLtKernel
from gemmsmith.core.launch import Algorithm
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.cublaslt import number
from tuner.arch import architecture
from tuner.backends import Level, candidates
from tuner.backends.cublaslt.algorithms import kernel_for
from tuner.compile import Builder
from tuner.devices.base import Contender, Device
from tuner.errors import NoLegalCandidate
from tuner.search.budget import Budget
from tuner.search.exploration import NOISE
from tuner.search.packs import RunPacks
from tuner.trial import Trial, Winner

Leaders = Callable[[], Sequence[Trial]]
"""The measured trials so far, fastest first."""


def offered(
    problem: Problem, device: Device, *, level: Level, built_by: Builder | None
) -> list[Candidate]:
    """The candidates, in no order. Empty if only the default can run the problem.

    `built_by` leaves out kernels that it would have to compile first.

    Raises:
        NoLegalCandidate: unknown architecture, or none of the candidates is compiled yet.
        NotRecorded: a recorded device does not hold the problem.
    """
    recorded = device.recorded(problem)
    known = _legal(problem, device, level) if recorded is None else list(recorded)
    if built_by is None:
        return known
    built = [candidate for candidate in known if built_by.has(candidate.kernel)]
    if known and not built and library_kernel(problem, device) is None:
        raise NoLegalCandidate(
            f"no kernel for {problem} is compiled yet; run `gemmsmith compile` first"
        )
    return built


def library_kernel(problem: Problem, device: Device) -> CublasLtKernel | None:
    """The library's kernel for the problem; None if the device or the library has none."""
    if device.replayed or not device.needs_packs:
        return None
    return kernel_for(problem, device.model.arch)


def renewed(
    chosen: Sequence[Candidate], problem: Problem, device: Device, packs: RunPacks
) -> list[Candidate]:
    """The candidates, those of another cuBLASLt with the same settings in the device's version.

    A candidate that this version does not take stays as it is, and fails when it runs.
    """
    present: list[Candidate] = []
    for candidate in chosen:
        fresh: Sequence[Candidate] = ()
        if (algorithm := foreign(candidate, device)) is not None:
            library = packs.contender(Candidate(kernel=candidate.kernel))
            fresh = device.proposals(problem, library, start=algorithm, most=1)
        present += fresh or [candidate]
    return list(dict.fromkeys(present))


def foreign(candidate: Candidate, device: Device) -> Algorithm | None:
    """The candidate's algorithm if it is of another cuBLASLt than the device's; else None."""
    algorithm = candidate.launch.algorithm
    if algorithm is UNSET or algorithm.library == number(device.environment.cublas):
        return None
    return algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The batches of one run. `tried` has the keys of candidates that were measured before."""

    problem: Problem
    kernel: CublasLtKernel
    device: Device
    packs: RunPacks
    budget: Budget
    tried: Container[str]

    def batches(self, leaders: Leaders, served: Winner | None) -> Iterator[list[Contender]]:
        """The next batch to measure, chosen after the times of the one before came in.

        The first is the algorithm of the winner that is `served`, if it has one.
        """
        contender = self.packs.contender(Candidate(kernel=self.kernel))
        if served is not None and served.candidate and served.candidate.kernel == self.kernel:
            (known,) = renewed([served.candidate], self.problem, self.device, self.packs)
            if foreign(known, self.device) is None and known.key not in self.tried:
                yield [self.packs.as_built(known)]
        measured = 0
        for start, most in self._rounds(leaders):
            # Algorithms near one are near the next, too: ask for more than are measured.
            proposals = self.device.proposals(
                self.problem, contender, start=start, most=most + measured
            )
            fresh = [proposal for proposal in proposals if proposal.key not in self.tried][:most]
            measured += len(fresh)
            yield [self.packs.as_built(candidate) for candidate in fresh]

    def _rounds(self, leaders: Leaders) -> Iterator[tuple[Algorithm | None, int]]:
        """Where to begin, and how many algorithms to measure.

        First the library's own list. Then, as long as that gains something, neighbours of the
        fastest so far: coordinate descent with a few coordinates at a time.
        """
        yield None, self.budget.library
        before: float | None = None
        for _ in range(0, self.budget.variants, self.budget.batch):
            trials = [trial for trial in leaders() if trial.candidate.kernel == self.kernel]
            if not trials or trials[0].statistics is None:
                return
            start, best = trials[0].candidate.launch.algorithm, trials[0].statistics.median_us
            if start is UNSET or (before is not None and best > before * (1 - NOISE)):
                return
            before = best
            yield start, self.budget.batch


def _legal(problem: Problem, device: Device, level: Level) -> list[Candidate]:
    """The backends' candidates; empty if no backend has a kernel for such a problem."""
    architecture(device.model.arch)  # raises if it is unknown
    try:
        return candidates(problem, device.model, level=level)
    except NoLegalCandidate:
        return []
