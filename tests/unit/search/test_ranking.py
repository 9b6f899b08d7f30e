"""Ranking: deterministic, by the predictions of a cost model."""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import Problem
from tests.support.candidates import PROBLEM, named
from tests.support.replacing import replace
from tuner.search.ranking import by_kernel, by_time, predictions

MODEL = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=2**37, l2_bytes=60 * 2**20
)


class ByTable:
    """Predicts from a table; what it does not know it predicts as equal."""

    def __init__(self, **times: float) -> None:
        self.times = times

    def predict(
        self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
    ) -> list[float]:
        return [self.times.get(c.kernel.name, 1.0) for c in candidates]


def test_the_fastest_prediction_leads_and_ties_fall_to_the_key() -> None:
    field = [named("c"), named("b"), named("a")]
    times = predictions(PROBLEM, field, MODEL, ByTable(c=0.5, a=1.0, b=1.0))
    order = by_time(field, times)
    assert [c.kernel.name for c in order] == ["c", "a", "b"]


def test_candidates_group_by_kernel_in_rank_order() -> None:
    swizzled = replace(named("a"), launch=Launch(swizzle=4))
    groups = by_kernel([named("b"), swizzled, named("a")])
    assert list(groups) == ["b", "a"]
    assert groups["a"] == [swizzled, named("a")]
