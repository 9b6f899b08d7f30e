"""In how many goes a run measures, and what it compiles for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from gemmsmith.kernel import Kernel
from gemmsmith.launch import Candidate
from gemmsmith.tuning import Effort
from tests.unit.search.test_exploration import LAUNCHES, kernel
from tuner.search.budget import BUDGETS, Budget
from tuner.search.exploration import Plan
from tuner.search.field import GAIN, Field

KERNELS = [kernel(f"k{i}", (64, 8 * (i + 1))) for i in range(30)]
DEFAULT = BUDGETS[Effort.DEFAULT]


def field(times: dict[Kernel, float]) -> Field:
    order = [Candidate(kernel=each, launch=LAUNCHES[0]) for each in sorted(times, key=times.get)]  # type: ignore[arg-type]
    return Field(order=order, predicted={each.key: times[each.kernel] for each in order})


def proposed(plan: Plan) -> list[str]:
    """Everything the plan tries while all measures alike, in its order."""
    tried: list[Candidate] = []
    for step in (plan.kernels, plan.launches):
        while found := step({each.key: 10.0 for each in tried}):
            tried += found
    return [each.kernel.name for each in tried]


def names(kernels: Collection[Kernel]) -> set[str]:
    return {each.name for each in kernels}


@pytest.mark.parametrize("built", [None, names(KERNELS)])
def test_where_nothing_needs_compiling_there_is_one_plan(built: set[str] | None) -> None:
    (plan,) = field({each: 10.0 + i for i, each in enumerate(KERNELS)}).plans(DEFAULT, built)
    assert len(plan.kernels({})) == DEFAULT.waves[0]


@pytest.mark.parametrize("built", [set(), names(KERNELS[: DEFAULT.kernels - 1])])
def test_where_too_little_is_built_all_kernels_compile_side_by_side(built: set[str]) -> None:
    (plan,) = field({each: 10.0 + i for i, each in enumerate(KERNELS)}).plans(DEFAULT, built)
    assert len(plan.kernels({})) == DEFAULT.kernels
    assert plan.kernels({}) == []


def test_built_kernels_answer_alone_where_no_other_is_expected_to_gain() -> None:
    times = {each: 10.0 + i for i, each in enumerate(KERNELS)}
    times[KERNELS[-1]] = 10.0 / (1 + GAIN / 2)
    (plan,) = field(times).plans(DEFAULT, names(KERNELS[:20]))
    assert set(proposed(plan)) <= names(KERNELS[:20])


def test_kernels_expected_to_gain_are_compiled_after_a_first_answer() -> None:
    times = {each: 10.0 + i for i, each in enumerate(KERNELS)}
    times[KERNELS[-1]], times[KERNELS[-2]] = 8.0, 9.9
    first, second = field(times).plans(DEFAULT, names(KERNELS[:20]))
    assert set(proposed(first)) <= names(KERNELS[:20])
    assert proposed(second) == [KERNELS[-1].name, KERNELS[-2].name]


def test_the_second_go_compiles_a_few_kernels_at_most() -> None:
    times = {each: 10.0 - i / 10 for i, each in enumerate(KERNELS)}
    _, second = field(times).plans(DEFAULT, names(KERNELS[:16]))
    assert len(set(proposed(second))) == DEFAULT.further


@pytest.mark.parametrize(
    ("budget", "plans"),
    [(BUDGETS[Effort.QUICK], 1), (replace(DEFAULT, further=0), 1), (BUDGETS[Effort.EXHAUSTIVE], 1)],
)
def test_quick_runs_never_look_twice_and_exhaustive_ones_need_not(
    budget: Budget, plans: int
) -> None:
    times = {each: 10.0 - i / 10 for i, each in enumerate(KERNELS)}
    assert len(field(times).plans(budget, names(KERNELS[:16]))) == plans
