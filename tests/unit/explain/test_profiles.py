"""Recorded profiles: Nsight Compute's waves, threads, shared memory and occupancy are ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmsmith.core.kernel import CutlassKernel
from tests.support import played_ncu
from tests.support.counted import check_counters
from tests.support.shipped import SLUG, shipped_files
from tuner.exchange import read_winners
from tuner.explain import explain
from tuner.explain.waits import WORDS, waits
from tuner.profiling import ncu
from tuner.profiling.files import read_profiles, shipped_folder
from tuner.profiling.records import ProblemProfile

RECORDED = [
    profile for path in sorted(shipped_folder().glob("*")) for profile in read_profiles(path)
]


def of_cutlass() -> list[ProblemProfile]:
    return [
        profile
        for profile in RECORDED
        if profile.candidate.candidate
        and isinstance(profile.candidate.candidate.kernel, CutlassKernel)
    ]


def named(profile: ProblemProfile) -> str:
    return f"{profile.device.arch}-{profile.problem}"


@pytest.mark.parametrize("profile", of_cutlass(), ids=named)
def test_waves_and_resources_are_those_that_were_counted(profile: ProblemProfile) -> None:
    check_counters(profile)


def test_a_profile_is_part_of_the_explanation() -> None:
    winners = {
        winner.problem: winner
        for file in shipped_files()
        if file.name.startswith(SLUG)
        for winner in read_winners(file)
    }
    for profile in RECORDED:
        if profile.device.slug != SLUG:
            continue
        item = explain(winners[profile.problem], profile=profile)
        assert item.profile == profile
        assert item.waits.startswith(f"By Nsight Compute on {profile.recorded_at[:10]}, ")
        candidate = winners[profile.problem].candidate
        is_same = candidate is not None and candidate == profile.candidate.candidate
        assert item.profile_is_earlier is not is_same
        assert ("of an earlier candidate" in item.waits) is not is_same
        assert "None" not in item.waits
    assert explain(next(iter(winners.values()))).waits == ""


def test_stalls_are_named_in_words() -> None:
    [ours] = ncu.per_launch(ncu.read(played_ncu.table("winner")), 3)
    [theirs] = ncu.per_launch(ncu.read(played_ncu.table("default")), 3)
    slower = replace(
        theirs, tensor=0.5, stalls={"selected": 10.0, "barrier": 9.0, "other_one": 1.0}
    )
    recorded = RECORDED[0]
    profile = replace(
        recorded,
        candidate=replace(recorded.candidate, kernels=(ours,)),
        default=replace(recorded.default, kernels=(slower,)),
    )
    assert waits(profile, recorded.candidate.candidate) == (
        f"By Nsight Compute on {recorded.recorded_at[:10]}, the tensor pipe is active 61% of the "
        "time with the candidate, 50% with the default; DRAM reaches 10% of its peak with the "
        "candidate, 12% with the default. A warp of the candidate spends its time waiting: 50% for "
        "the tensor cores, 25% for data from L1, L2 or memory. A warp of the default spends its "
        "time waiting: 45% for other warps, at a barrier, 5% for other one."
    )
    assert "was not counted" in waits(recorded_without_stalls(profile), None)


def recorded_without_stalls(profile: ProblemProfile) -> ProblemProfile:
    bare = replace(profile.default.main, stalls={}, tensor=None, sm=None, dram=None)
    return replace(profile, default=replace(profile.default, kernels=(bare,)))


def test_every_reason_of_hopper_has_words() -> None:
    assert {*ncu.REASONS} <= {*WORDS}
