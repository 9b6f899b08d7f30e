"""What is measured next: bounds, diversity, correction by what was measured, launches around."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.tuning import Effort
from tests.support.candidates import named
from tests.support.replacing import replace
from tuner.search.budget import BUDGETS, Budget
from tuner.search.exploration import Proposals, launch_distance

LAUNCHES = [
    Launch(raster=raster, swizzle=swizzle)
    for raster in (RasterOrder.ALONG_M, RasterOrder.ALONG_N)
    for swizzle in (1, 2, 4, 8)
]


def kernel(name: str, tile: tuple[int, int], **choices: object) -> Kernel:
    return replace(named(name).kernel, tile=(*tile, 64), **choices)  # type: ignore[arg-type]


def budget(**bounds: object) -> Budget:
    return replace(BUDGETS[Effort.DEFAULT], **bounds)  # type: ignore[arg-type]


def plan(
    kernels: Mapping[Kernel, float], bounds: Budget, first: tuple[Candidate, ...] = ()
) -> Proposals:
    """Of kernels and their predicted times, each with all launches."""
    found = [Candidate(kernel=each, launch=launch) for each in kernels for launch in LAUNCHES]
    return Proposals(found, {each.key: kernels[each.kernel] for each in found}, bounds, first)


def names(candidates: list[Candidate]) -> list[str]:
    return [candidate.kernel.name for candidate in candidates]


MANY = {kernel(f"k{i}", (64 * (1 + i % 4), 64), swapped=i % 2 == 1): 10.0 + i for i in range(20)}


@pytest.mark.parametrize("effort", Effort)
def test_the_efforts_bounds(effort: Effort) -> None:
    bounds = BUDGETS[effort]
    assert bounds.kernels <= bounds.trials
    assert bounds.seeds + bounds.hints < bounds.kernels
    assert bounds.finalists <= bounds.trials


def test_the_bounds_of_the_default_and_the_quick_effort() -> None:
    assert (BUDGETS[Effort.DEFAULT].kernels, BUDGETS[Effort.DEFAULT].trials) == (16, 48)
    assert (BUDGETS[Effort.QUICK].kernels, BUDGETS[Effort.QUICK].trials) == (10, 12)


@pytest.mark.parametrize("trials", [1, 3, 5, 7, 20])
def test_a_plan_keeps_to_its_bounds(trials: int) -> None:
    tried: list[Candidate] = []
    made = plan(MANY, budget(waves=(3, 2), trials=trials))
    for step in (made.kernels, made.launches):
        # Every batch is faster than the last: none is a reason to stop.
        while proposed := step({each.key: 0.99**place for place, each in enumerate(tried)}):
            tried += proposed
    assert len(tried) == len({each.key for each in tried}) == trials
    assert len(set(names(tried))) == min(5, trials)


def test_launches_end_with_a_batch_that_gains_less_than_the_noise() -> None:
    made = plan(MANY, budget(waves=(3,), trials=20, batch=4))
    tried = made.kernels({})
    times = {each.key: 10.0 for each in tried}
    first = made.launches(times)
    times |= {each.key: 9.9 for each in first}
    second = made.launches(times)
    assert second
    times |= {each.key: 9.89 for each in second}
    assert made.launches(times) == []


def test_an_exhaustive_plan_is_the_whole_space() -> None:
    made = plan(MANY, BUDGETS[Effort.EXHAUSTIVE])
    leaders = made.kernels({})
    assert names(leaders) == [each.name for each in MANY]
    assert made.kernels({}) == []
    rest = made.launches({each.key: 10.0 + 90.0 * i for i, each in enumerate(leaders)})
    assert len(leaders) + len(rest) == len(MANY) * len(LAUNCHES)


def test_every_second_kernel_brings_a_new_tile() -> None:
    alike = {kernel(f"a{i}", (128, 112)): 10.0 + i for i in range(6)}
    others = {kernel(f"b{i}", (128, 128 + 8 * i)): 20.0 + i for i in range(6)}
    made = plan(alike | others, budget(waves=(6,)))
    assert names(made.kernels({})) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_what_leads_by_other_evidence_comes_first_with_its_own_launch() -> None:
    favourite, *_, last = MANY
    first = Candidate(kernel=last, launch=LAUNCHES[5])
    made = plan(MANY, budget(waves=(2,)), (first, replace(first, launch=LAUNCHES[6])))
    leaders = made.kernels({})
    assert leaders[0] == first
    assert names(leaders) == [last.name, favourite.name]


def test_a_stranger_cannot_lead() -> None:
    made = plan(MANY, budget(waves=(2,)), (named("elsewhere"),))
    assert "elsewhere" not in names(made.kernels({}))


def test_the_model_is_corrected_by_what_was_measured() -> None:
    """Swapped kernels are predicted to be the faster ones, and take twice as long."""
    swapped = {kernel(f"s{i}", (64, 8 * (i + 1)), swapped=True): 10.0 + i / 10 for i in range(8)}
    plain = {kernel(f"p{i}", (128, 8 * (i + 1))): 12.0 + i / 10 for i in range(8)}
    late = {kernel("p", (64, 8)): 11.9}
    made = plan(swapped | plain | late, budget(waves=(4, 4)))
    made._expected["p0"] = 0.0  # one plain kernel is among the first
    wave = made.kernels({})
    assert "p0" in names(wave)
    times = {each.key: 20.0 if each.kernel.swapped else 1.0 for each in wave}
    assert not any(each.kernel.swapped for each in made.kernels(times))


def test_failed_kernels_have_no_time_and_stop_nothing() -> None:
    made = plan(MANY, budget(waves=(3, 3), trials=8))
    assert made.kernels({})
    assert made.kernels({})
    assert made.kernels({}) == []
    assert made.launches({}) == []


def test_launches_are_tried_around_the_best_one() -> None:
    only = kernel("k", (128, 128))
    best = Candidate(kernel=only, launch=LAUNCHES[2])  # along M, swizzle 4
    made = plan({only: 10.0}, budget(waves=(1,), trials=4, batch=2), (best,))
    assert made.kernels({}) == [best]
    times = {best.key: 10.0}
    nearest = made.launches(times)
    assert {launch_distance(best.launch, each.launch) for each in nearest} == {1.0}
    better = nearest[1]
    times |= {nearest[0].key: 11.0, better.key: 9.0}
    (last,) = made.launches(times)
    assert launch_distance(better.launch, last.launch) == 1.0
    assert made.launches(times) == []


def test_better_kernels_get_more_launches_and_hopeless_ones_none() -> None:
    good, fair, hopeless = (kernel(name, (64, 64)) for name in ("good", "fair", "hopeless"))
    made = plan({good: 1.0, fair: 1.0, hopeless: 1.0}, budget(waves=(3,), trials=11, batch=8))
    times = {
        each.key: {"good": 10.0, "fair": 10.5, "hopeless": 20.0}[each.kernel.name]
        for each in made.kernels({})
    }
    tried = names(made.launches(times))
    assert tried[0] == "good"
    assert tried.count("good") > tried.count("fair") > 0
    assert "hopeless" not in tried


def test_launches_are_as_far_apart_as_their_choices() -> None:
    launch = Launch(decomposition=Decomposition.SPLIT_K, splits=4)
    assert launch_distance(launch, launch) == 0
    assert launch_distance(launch, replace(launch, splits=8)) == 1
    assert launch_distance(launch, replace(launch, raster=RasterOrder.ALONG_N, swizzle=4)) == 3
    assert launch_distance(launch, replace(launch, sm_budget=100)) == 1
