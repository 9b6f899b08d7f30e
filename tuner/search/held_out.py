"""Learned models that never saw the problem they are asked about: for judging, not for tuning."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel
from gemmsmith.problem import Problem
from tuner.search.features import Measured
from tuner.search.learned import LearnedModel, fit


def sizes(problem: Problem) -> tuple[object, ...]:
    """What problems that differ in nothing but their element types have in common."""
    return problem.m, problem.n, problem.k, problem.batch, problem.layout


class HeldOut:
    """A ranker that trains, for each problem, on the measurements of all other sizes.

    Raises:
        ModelUnusable: at the first prediction: no LightGBM, or nothing else to learn from.
    """

    def __init__(self, measured: Sequence[Measured]) -> None:
        self._measured = measured
        self._models: dict[tuple[object, ...], LearnedModel] = {}

    def predict(
        self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
    ) -> list[float]:
        """Predicted microseconds per launch, one for each candidate, in their order."""
        out = sizes(problem)
        if out not in self._models:
            others = [one for one in self._measured if sizes(one.problem) != out]
            self._models[out] = fit(others, trained_at="")
        return self._models[out].predict(problem, candidates, device)
