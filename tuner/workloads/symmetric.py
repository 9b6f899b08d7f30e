"""Products A·Aᵀ of a matrix and its transpose, bf16 and fp16.

torch computes all of D, by `torch.mm` or `torch.bmm`; it has no call that uses the symmetry. A is
drawn so that D's standard deviation is 1 off the diagonal; on it, D is near √K. A kernel's
D must be symmetric to the bit. Tolerances are those of other products of these types. They are
relative to a norm that includes the diagonal: one dropped slice of 64 out of K gives an error of
√(64 / (K · (1 + K / N))), 2.8e-2 at N = 4096 and K = 16384.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.workloads.dense import Dense
from tuner.workloads.matrices import draw_matrices
from tuner.workloads.workload import Case, Drawn, RandomSource, Way


class Symmetric(Dense):
    """A·Aᵀ in bf16 and fp16."""

    def covers(self, operation: Operation) -> bool:
        return operation.symmetric

    def draw(self, problem: Problem, count: int, source: RandomSource) -> Drawn:
        """`count` sets of operands, whose B is a view of A."""
        drawn, check = draw_matrices(problem, count, source, problem.k**-0.25, 0.0)
        sets = tuple(replace(s, b=s.a.mT) for s in drawn)
        sigma = math.hypot(1.0, math.sqrt(problem.k / problem.n))
        case = Case(
            operands=sets[0],
            written=problem.m,
            sigmas=(sigma,),
            beside=partial(_asymmetry, sets[0].d),
        )
        return Drawn(sets=sets, check=check, sigma=sigma, cases=(case,))

    def alternatives(self, problem: Problem) -> Sequence[Way]:  # noqa: ARG002
        return ()


def _asymmetry(d: torch.Tensor, bound: float) -> str | None:  # noqa: ARG001 - bits, not values
    bits = d.view(torch.int16)
    unequal = int((bits != bits.mT).sum()) // 2
    return f"{unequal} elements differ from those across the diagonal" if unequal else None
