"""Tiny recordings of an invented GPU, for tests that need a device to tune on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemmsmith.answers.answer import Conditions, Correctness
from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tests.support.serving import ENVIRONMENT, H200
from tuner.backends import candidates
from tuner.devices.recording import (
    SCHEMA,
    SUFFIX,
    Header,
    RecordedProblem,
    RecordedTrial,
    SweepWriter,
)
from tuner.trial import Failure, FailureKind

CUBLAS_US = 20.0
BEST_US = 16.0
CONDITIONS = Conditions(sm_clock_mhz=1900.0, power_w=500.0, temperature_c=50.0)
CORRECT = Correctness(error=1e-3, max_error=2e-3, tolerance=1e-2, repeatable=True)


def some_candidates(problem: Problem, count: int = 8) -> list[Candidate]:
    """Candidates of different kernels, in a fixed order."""
    by_kernel: dict[str, Candidate] = {}
    for candidate in candidates(problem, H200):
        by_kernel.setdefault(candidate.kernel.name, candidate)
    return list(by_kernel.values())[:count]


def record(
    folder: Path,
    *problems: Problem,
    name: str = "h200",
    device: DeviceModel = H200,
    choose: Callable[[Problem], Sequence[Candidate]] = some_candidates,
) -> Path:
    """Write a sweep file in which the third candidate is the fastest, and the first one fails."""
    header = Header(
        schema=SCHEMA,
        device=device,
        environment=ENVIRONMENT,
        recorded_at="2026-11-21T00:00:00Z",
        gemmsmith="0.1.0",
    )
    path = folder / f"{name}{SUFFIX}"
    with SweepWriter(path, header) as writer:
        for problem in problems:
            writer.append(_recorded(problem, choose(problem)))
    return path


def best_of(problem: Problem) -> Candidate:
    """The fastest candidate in a file of `record`."""
    return some_candidates(problem)[2]


def _recorded(problem: Problem, candidates: Sequence[Candidate]) -> RecordedProblem:
    trials = [
        RecordedTrial(
            candidate=candidates[0],
            failure=Failure(kind=FailureKind.REFUSED, message="can_implement refused"),
        )
    ]
    for i, candidate in enumerate(candidates[1:], 1):
        us = BEST_US + 3.0 * abs(i - 2)
        trials.append(
            RecordedTrial(
                candidate=candidate,
                common_us=_rounds(us, 7),
                further_us=_rounds(us, 25),
                correctness=CORRECT,
            )
        )
    return RecordedProblem(
        problem=problem,
        baseline_common_us=_rounds(CUBLAS_US, 7),
        baseline_further_us=_rounds(CUBLAS_US, 25),
        conditions=CONDITIONS,
        further_conditions=CONDITIONS,
        discarded_rounds=0,
        trials=tuple(trials),
    )


def _rounds(us: float, count: int) -> tuple[float, ...]:
    """Times that vary a little, equally for all candidates, as with a GPU's clock."""
    return tuple(us * (1 + 0.002 * (i % 5 - 2)) for i in range(count))
