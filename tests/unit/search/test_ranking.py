"""Ranking: deterministic, by the predictions of a cost model."""

from __future__ import annotations

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.launch import Launch
from tests.support.candidates import PROBLEM, named
from tests.support.replacing import replace
from tuner.search.ranking import by_kernel, by_time, predictions

MODEL = DeviceModel(
    name="NVIDIA H200", arch="sm90", sm_count=132, memory_bytes=2**37, l2_bytes=60 * 2**20
)


def test_the_fastest_prediction_leads_and_ties_fall_to_the_key() -> None:
    field = [named("c"), named("b"), named("a")]
    times = predictions(PROBLEM, field, MODEL, lambda *_: [0.5, 1.0, 1.0])
    order = by_time(field, times)
    assert [c.kernel.name for c in order] == ["c", "a", "b"]


def test_candidates_group_by_kernel_in_rank_order() -> None:
    swizzled = replace(named("a"), launch=Launch(swizzle=4))
    groups = by_kernel([named("b"), swizzled, named("a")])
    assert list(groups) == ["b", "a"]
    assert groups["a"] == [swizzled, named("a")]
