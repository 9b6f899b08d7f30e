"""Outputs in FP8: their factor, their largest value, and how far they may lie from the reference.

D is multiplied by a power of two before it is rounded, which brings the value of seven standard
deviations just below E4M3's maximum, as a factor from earlier steps would. So nothing saturates,
and D's largest value is that of the reference. Kernels and torch's ways add it to a running one,
which nobody zeroes between launches: a program does so once in many steps. What a launch that is
verified leaves starts from zero.

E4M3 has four significant bits. Rounding to it gives at most 2⁻⁴ = 6.25e-2 of one element and 2.4e-2
to 2.8e-2 of many. So there are two bounds: 6.5e-2, which a matrix of a single element passes, and
4e-2 of many elements. Sums in the tensor core add their drift. One dropped slice of 128 out of K
gives √(128/K), beside rounding, and of many elements does not pass up to K = 23,000, drift allowed
for; the layers before an activation have less (Llama 3's at most 16,384). The largest error is
relative to the largest value, so rounding alone is 6.25e-2 of it as well. The largest value is in
FP32, and as exact as the bare product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments
from tuner.workloads.workload import OperandSet, RandomSource, Tolerance, drawn_with

LARGEST = 448.0
"""Of E4M3."""

SIGMAS = 7.0
"""Standard deviations that the factor leaves room for."""

_ERROR, _ERROR_OF_MANY, _MAX_ERROR = 6.5e-2, 4e-2, 0.1
_MANY = 4096
"""Elements, over which the errors of rounding average."""


def with_factor(
    sets: Sequence[OperandSet], largest: float, source: RandomSource
) -> tuple[tuple[OperandSet, ...], float]:
    """The sets with a factor that brings `largest` within range, and a largest value each; and the
    factor.
    """
    factor = 2.0 ** math.floor(math.log2(LARGEST / largest))
    scale_d = torch.full((1,), factor, dtype=torch.float32, device=source.place)
    seen = torch.zeros((len(sets), 1), dtype=torch.float32, device=source.place)
    return tuple(
        replace(s, scale_d=scale_d, amax=amax) for s, amax in zip(sets, seen, strict=True)
    ), factor


def tell(arguments: Arguments, operands: OperandSet) -> None:
    """Say where a set's factor and largest value lie."""
    arguments.scale_d = drawn_with(operands.scale_d).data_ptr()
    arguments.amax = drawn_with(operands.amax).data_ptr()


def rounded(problem: Problem, exact: Tolerance) -> Tolerance:
    """The bounds of D in E4M3, of a product whose D in 16 bits has those of `exact`."""
    error = _ERROR_OF_MANY if problem.m * problem.columns >= _MANY else _ERROR
    return replace(exact, error=error, max_error=_MAX_ERROR, amax=exact.max_error)
