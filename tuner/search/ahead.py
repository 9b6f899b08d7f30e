"""The kernels that a tuning run will begin with, known before it runs so that they are compiled.

The choice is the run's own, except for what only a GPU shows: which kernels resemble cuBLAS's, and
how fast the first ones were. A run that then lacks kernels requests them.
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
    candidates: Sequence[Candidate],
    model: DeviceModel,
    *,
    store: Store,
    builder: Builder,
    ranker: Ranker,
    effort: Effort,
) -> list[AnyKernel]:
    """The kernels that a run of that effort measures first, in its order; built or not.

    The run chooses from `candidates`. Its later choices follow from measurements; here they are
    made as if every candidate took the predicted time.
    """
    budget = BUDGETS[effort]
    if effort is Effort.RECHECK:
        top = top_candidates(store, problem, model.slug, candidates, budget.finalists)
        return _kernels(top)
    predicted = predictions(problem, candidates, model, ranker)
    order = by_time(candidates, predicted)
    legal = {candidate.key for candidate in order}
    near = [seed for seed in near_winners(store, problem, model.slug) if seed.key in legal]
    built = {kernel.name for kernel in _kernels(order) if builder.has(kernel)}
    field = Field(order=order, predicted=predicted, first=near[: budget.seeds], built=built)
    plan = field.plan(budget)
    chosen: list[Candidate] = []
    while wave := plan.kernels({}):
        chosen += wave
    return _kernels(chosen)


def _kernels(candidates: Sequence[Candidate]) -> list[AnyKernel]:
    kernels = {candidate.kernel.name: candidate.kernel for candidate in candidates}
    return list(kernels.values())
