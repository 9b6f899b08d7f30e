"""Which kernels are compiled next, for problems of which each has expectations."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from random import Random
from statistics import fmean

import pytest

from tests.unit.search.test_exploration import kernel
from tuner.compile import plan
from tuner.search.worth import REPAID_S, ROUND_S, SPREAD, Prospect, improvement, next_round

KERNELS = [kernel(f"k{i}", (64, 8 * (i + 1))) for i in range(30)]


def prospect(
    expected: Mapping[int, float], *, calls: float = 1.0, us: float = 100.0, answered: bool = True
) -> Prospect:
    return Prospect(
        calls=calls,
        us=us,
        answered=answered,
        expected={KERNELS[i].name: value for i, value in expected.items()},
        wishes=[KERNELS[i] for i in expected],
    )


def chosen(*prospects: Prospect, parallel: int = 16) -> list[int]:
    return [KERNELS.index(taken) for taken in next_round(prospects, parallel)]  # type: ignore[arg-type]


@pytest.mark.parametrize("expected", [60.0, 95.0, 100.0, 120.0])
def test_an_improvement_is_the_mean_of_what_a_kernel_may_save(expected: float) -> None:
    draw = Random(1)
    times = (expected * exp(draw.gauss(-(SPREAD**2) / 2, SPREAD)) for _ in range(50_000))
    sampled = fmean(max(0.0, 100.0 - us) for us in times)
    assert improvement(100.0, expected) == pytest.approx(sampled, abs=0.15)


def test_most_saved_comes_first() -> None:
    assert chosen(prospect({0: 80.0, 1: 60.0}))[0] == 1
    assert chosen(prospect({0: 80.0}, calls=10), prospect({1: 60.0}))[0] == 0


def test_a_kernel_counts_for_every_problem_that_it_may_win() -> None:
    ours = [prospect({0: 85.0, i: 80.0}) for i in range(1, 4)]
    assert chosen(*ours)[0] == 0


def test_kernels_that_share_the_front_end_are_cheaper() -> None:
    """The second one saves less than another tile would, but costs a sixth."""
    twin = kernel("twin", (64, 8), cluster=(2, 1))
    assert plan.alike(twin) == plan.alike(KERNELS[0]) != plan.alike(KERNELS[1])
    ours = [
        Prospect(calls=1.0, us=100.0, answered=True, expected={k.name: us}, wishes=[k])
        for k, us in ((KERNELS[0], 50.0), (KERNELS[1], 60.0), (twin, 70.0))
    ]
    assert next_round(ours, 16) == [KERNELS[0], twin, KERNELS[1]]


def test_what_one_kernel_saves_no_other_saves_again() -> None:
    alike = prospect(dict.fromkeys(range(10), 70.0))
    assert chosen(alike, prospect({20: 80.0}))[:2] == [0, 20]


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_round_has_room_for_a_minute_on_every_core(parallel: int) -> None:
    several = [prospect({i: 20.0}) for i in range(30)]
    taken = chosen(*several, parallel=parallel)
    seconds = len(taken) * plan.share(known=False)
    assert parallel * ROUND_S <= seconds < parallel * ROUND_S + plan.share(known=False)


def test_nothing_is_compiled_that_does_not_pay_for_its_seconds() -> None:
    assert chosen(prospect({0: 150.0})) == []
    assert chosen(prospect({0: 100.0}, us=1.0), prospect({}, us=1e6)) == []
    least_s = plan.BASE_COST + plan.VARIETY_COST
    saved = 100.0 * least_s / REPAID_S
    assert chosen(prospect({0: 100.0 - 2 * saved}), prospect({}, us=1.0)) == [0]
    small = prospect({0: 50.0})
    assert chosen(small, prospect({}, us=60.0 / saved * 100.0)) == []


def test_a_problem_without_an_answer_gets_a_kernel_before_anything_else() -> None:
    large = prospect(dict.fromkeys(range(10), 50.0), calls=1000)
    small = prospect({20: 90.0, 21: 99.0}, us=1.0, answered=False)
    assert chosen(large, small)[0] == 20
    # One kernel may be the answer to several.
    second = prospect({21: 90.0, 20: 99.0}, us=1.0, answered=False)
    assert len({20, 21} & set(chosen(large, small, second, parallel=1)[:2])) >= 1


def test_a_problem_may_use_what_another_asked_for() -> None:
    ours = Prospect(calls=1.0, us=100.0, answered=True, expected={KERNELS[0].name: 90.0}, wishes=[])
    assert ours.may_use(KERNELS[0])
    assert not ours.may_use(KERNELS[1])
