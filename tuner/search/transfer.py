"""Winners of near problems, to be tried first.

bf16 and fp16 kernels of one shape behave alike: same instruction rate, same bytes. So where one of
the two has been tuned, its winners, as kernels of the other, lead the list too.
"""

from __future__ import annotations

from dataclasses import replace

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.problem import DType, Problem
from tuner.backends import refusal, splits_refusal
from tuner.backends.cutlass.operation import of_type
from tuner.store import Store

NEIGHBOURS = 8
"""Near problems looked at: beyond, sizes differ so much that the best tile does too."""

_TWINS: dict[str, str] = {DType.BF16: DType.FP16, DType.FP16: DType.BF16}


def near_winners(store: Store, problem: Problem, device: str) -> list[Candidate]:
    """Candidates that won near problems and are legal here, nearest first, each once."""
    found = store.near_winners(problem, device, limit=NEIGHBOURS)
    if (twin := _TWINS.get(problem.dtype)) is not None:
        found += store.near_winners(replace(problem, dtype=twin), device, limit=NEIGHBOURS)
    found.sort(key=lambda winner: problem.distance(winner.problem))  # stable: own type first
    near: dict[str, Candidate] = {}
    for winner in found:
        if winner.candidate is None or not isinstance(winner.candidate.kernel, CutlassKernel):
            continue
        kernel, launch = of_type(winner.candidate.kernel, problem.dtype), winner.candidate.launch
        candidate = Candidate(kernel=kernel, launch=launch)
        if refusal(kernel, problem) is None and splits_refusal(kernel, launch, problem) is None:
            near.setdefault(candidate.key, candidate)
    return list(near.values())
