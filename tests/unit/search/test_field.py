"""In how many goes a run measures, and what it compiles for them."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Kernel
from gemmsmith.core.tuning import Effort
from tests.support.replacing import replace
from tests.unit.search.test_exploration import LAUNCHES, kernel
from tuner.search.budget import BUDGETS, Budget
from tuner.search.exploration import BEHIND, GAIN, Field, Proposals

KERNELS = [kernel(f"k{i}", (64, 8 * (i + 1))) for i in range(30)]
DEFAULT = BUDGETS[Effort.DEFAULT]


def field(times: dict[Kernel, float], built: set[str] | None) -> Field:
    order = [Candidate(kernel=each, launch=LAUNCHES[0]) for each in sorted(times, key=times.get)]  # type: ignore[arg-type]
    predicted = {each.key: times[each.kernel] for each in order}
    return Field(order=order, predicted=predicted, built=built)


def proposed(plan: Proposals) -> list[str]:
    """Everything the plan tries while all measures alike, in its order."""
    tried: list[Candidate] = []
    for step in (plan.kernels, plan.launches):
        while found := step({each.key: 10.0 for each in tried}):
            tried += found
    return [each.kernel.name for each in tried]


def names(kernels: Collection[Kernel]) -> set[str]:
    return {each.name for each in kernels}


RISING = {each: 10.0 + i for i, each in enumerate(KERNELS)}
FALLING = {each: 10.0 - i / 10 for i, each in enumerate(KERNELS)}


@pytest.mark.parametrize("built", [None, names(KERNELS)])
def test_where_nothing_needs_compiling_there_is_one_go(built: set[str] | None) -> None:
    chosen = field(RISING, built)
    assert len(chosen.plan(DEFAULT).kernels({})) == DEFAULT.waves[0]
    assert chosen.further(DEFAULT, 0.5) is None


@pytest.mark.parametrize("count", [0, 1, DEFAULT.kernels - 1])
def test_where_too_little_is_built_it_answers_first_and_a_dozen_kernels_in_all_are_compiled(
    count: int,
) -> None:
    built = names(KERNELS[:count])
    chosen = field(RISING, built)
    assert set(proposed(chosen.plan(DEFAULT))) == built
    favourites = {candidate.kernel.name for candidate in chosen.favourites(DEFAULT)}
    assert len(favourites) == DEFAULT.cold < DEFAULT.kernels
    further = chosen.further(DEFAULT, 1.2)
    compiled = set() if further is None else {c.kernel.name for c in further.kernels({})}
    assert compiled == favourites - built


def test_built_kernels_answer_alone_where_no_other_is_expected_to_gain() -> None:
    chosen = field({**RISING, KERNELS[-1]: 10.0 / (1 + GAIN / 2)}, names(KERNELS[:20]))
    assert set(proposed(chosen.plan(DEFAULT))) <= names(KERNELS[:20])
    assert chosen.further(DEFAULT, 1.2) is None
    assert chosen.further(DEFAULT, None) is None


def test_kernels_expected_to_gain_are_compiled_after_a_first_answer() -> None:
    chosen = field({**RISING, KERNELS[-1]: 8.0, KERNELS[-2]: 9.9}, names(KERNELS[:20]))
    assert set(proposed(chosen.plan(DEFAULT))) <= names(KERNELS[:20])
    further = chosen.further(DEFAULT, 1.2)
    assert further is not None
    assert proposed(further) == [KERNELS[-1].name, KERNELS[-2].name]


def test_where_cublas_is_ahead_the_model_is_not_believed() -> None:
    chosen = field(RISING, names(KERNELS[:20]))
    assert chosen.further(DEFAULT, 1 - BEHIND / 2) is None
    further = chosen.further(DEFAULT, 1 - 2 * BEHIND)
    assert further is not None
    assert set(proposed(further)) == names(KERNELS[20 : 20 + DEFAULT.further])


def test_the_second_go_compiles_a_few_kernels_at_most() -> None:
    further = field(FALLING, names(KERNELS[:16])).further(DEFAULT, 1.0)
    assert further is not None
    assert len(set(proposed(further))) == DEFAULT.further


@pytest.mark.parametrize("budget", [BUDGETS[Effort.QUICK], replace(DEFAULT, further=0)])
def test_quick_runs_never_look_twice(budget: Budget) -> None:
    assert field(FALLING, names(KERNELS[:16])).further(budget, 0.5) is None


def test_exhaustive_runs_compile_all_that_is_left() -> None:
    further = field(FALLING, names(KERNELS[:16])).further(BUDGETS[Effort.EXHAUSTIVE], 2.0)
    assert further is not None
    assert set(proposed(further)) == names(KERNELS[16:])
