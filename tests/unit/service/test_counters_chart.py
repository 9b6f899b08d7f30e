"""The charts of a profile: a row for each counter, whatever was counted."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from service.charts import counters
from tests.support import played_ncu
from tuner.profiling import ncu
from tuner.profiling.files import read_profiles, shipped_folder
from tuner.profiling.records import Counters, ProblemProfile

[SHIPPED, *_] = read_profiles(shipped_folder() / "nvidia-h200-132sm.jsonl")
[COUNTED] = ncu.per_launch(ncu.read(played_ncu.table("winner")), 3)
NOTHING = replace(COUNTED, stalls={}, tensor=None, issue=None, sm=None, l2=None, dram=None)


def profile(ours: Counters, theirs: Counters) -> ProblemProfile:
    return replace(
        SHIPPED,
        candidate=replace(SHIPPED.candidate, kernels=(ours,)),
        default=replace(SHIPPED.default, kernels=(theirs,)),
    )


def titles(chart: str) -> list[str]:
    drawn = ElementTree.fromstring(chart)
    return [str(title.text) for title in drawn.iter("{http://www.w3.org/2000/svg}title")]


def test_reasons_are_ordered_by_their_share() -> None:
    longer = replace(COUNTED, stalls={**COUNTED.stalls, "barrier": 50.0, "<b>&": 9.0})
    assert titles(counters.waits(profile(COUNTED, longer)))[:3] == [
        "other warps, at a barrier: candidate 20.0%, default 63.3%",
        "the tensor cores: candidate 50.0%, default 15.8%",
        "data from L1, L2 or memory: candidate 25.0%, default 7.9%",
    ]
    assert "<b>&: candidate not counted, default 11.4%" in titles(
        counters.waits(profile(COUNTED, longer))
    )


def test_what_was_counted_of_one_side_only_is_drawn() -> None:
    drawn = counters.units(profile(COUNTED, replace(NOTHING, occupancy=None)))
    assert "tensor pipe active: candidate 61.2%, default not counted" in titles(drawn)
    assert drawn.count("<circle") == 6


def test_shares_of_nothing_are_drawn() -> None:
    rest = replace(NOTHING, occupancy=0.0)
    assert titles(counters.units(profile(rest, rest))) == [
        "warps on an SM: candidate 0.0%, default 0.0%"
    ]


def test_without_counters_nothing_is_drawn() -> None:
    none = replace(NOTHING, occupancy=None)
    assert counters.units(profile(none, none)) == ""
    assert counters.waits(profile(none, none)) == ""
