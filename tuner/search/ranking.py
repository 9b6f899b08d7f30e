"""Which candidates to try first: the order by the predictions of a cost model.

Invariant: the same inputs give the same order; ties in the prediction fall back to the candidate's
key, so the order of a dictionary or set never decides which kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.problem import Problem
from tuner.search.cost_model import predicted_us

Ranker = Callable[[Problem, Sequence[Candidate], DeviceModel], list[float]]
"""A cost model: predicted microseconds per launch, one for each candidate, in their order."""


def predictions(
    problem: Problem,
    candidates: Sequence[Candidate],
    device: DeviceModel,
    ranker: Ranker = predicted_us,
) -> dict[str, float]:
    times = ranker(problem, candidates, device)
    return {candidate.key: time for candidate, time in zip(candidates, times, strict=True)}


def by_time(candidates: Sequence[Candidate], times: Mapping[str, float]) -> list[Candidate]:
    """`candidates`, the fastest first; equal times in the order of their keys."""

    def place(candidate: Candidate) -> tuple[float, str]:
        key = candidate.key
        return times[key], key

    return sorted(candidates, key=place)


def by_kernel(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Ranked candidates by kernel name; kernels and launches keep their order."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.kernel.name, []).append(candidate)
    return groups
