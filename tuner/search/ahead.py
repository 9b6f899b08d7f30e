"""Which kernels a tuning run will begin with, told before it runs: so that they are compiled first.

The same choice as the run's own, but for what only a GPU can tell: which kernels cuBLAS's resemble,
and how fast the first ones were. A run that then lacks kernels asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from gemmsmith.core.tuning import Effort
from tuner.compile import Builder
from tuner.search.budget import BUDGETS
from tuner.search.exploration import Field
from tuner.search.finals import top_candidates
from tuner.search.hints import near_winners
from tuner.search.ranking import Ranker, by_time, predictions
from tuner.store import Store


def first_kernels(
    problem: Problem,
    found: Sequence[Candidate],
    model: DeviceModel,
    *,
    store: Store,
    builder: Builder,
    ranker: Ranker,
    effort: Effort,
) -> list[AnyKernel]:
    """The kernels that a run of that effort measures first, in its order; built or not.

    `found` are the candidates that it chooses from. What the run chooses once it has measured some
    is chosen here as if all had taken the time that the model predicts.
    """
    budget = BUDGETS[effort]
    if effort is Effort.RECHECK:
        top = top_candidates(store, problem, model.slug, found, budget.finalists)
        return _kernels(top)
    predicted = predictions(problem, found, model, ranker)
    order = by_time(found, predicted)
    there = {candidate.key for candidate in order}
    near = [seed for seed in near_winners(store, problem, model.slug) if seed.key in there]
    built = {kernel.name for kernel in _kernels(order) if builder.has(kernel)}
    field = Field(order=order, predicted=predicted, first=near[: budget.seeds], built=built)
    plan = field.plan(budget)
    chosen: list[Candidate] = []
    while wave := plan.kernels({}):
        chosen += wave
    return _kernels(chosen)


def _kernels(candidates: Sequence[Candidate]) -> list[AnyKernel]:
    """Each kernel once."""
    return list({each.kernel.name: each.kernel for each in candidates}.values())
