"""Outputs in FP8: their factor, their largest value, and their tolerance.

D is multiplied by a power of two before it is rounded. The factor brings seven standard deviations
just below E4M3's maximum, as a factor from earlier training steps would. So nothing saturates, and
D's largest value is that of the reference. Kernels and torch's calls take the maximum with a
running value, which launches do not reset: a program does so once in many steps. It is set to zero
before a launch that is verified.

E4M3 has four significant bits. Rounding to it gives an error of at most 2⁻⁴ = 6.25e-2 for one
element and 2.4e-2 to 2.8e-2 for many. So there are two bounds: 6.5e-2, which a matrix of a single
element passes, and 4e-2 for many elements. Sums in the tensor core add their drift. One dropped
slice of 128 out of K gives √(128/K) beside rounding, which exceeds the bound for many elements,
with drift, up to K = 23,000; layers before an activation have a smaller K (Llama 3's at most
16,384). The largest error is relative to the largest value, so rounding alone gives 6.25e-2 there
too. The largest value is in FP32, and as exact as the bare product.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gemmsmith.core.problem import Problem
from tuner.workloads.workload import Tolerance

LARGEST = 448.0
"""E4M3's maximum."""

SIGMAS = 7.0
"""Standard deviations that the factor brings below LARGEST."""

_ERROR, _ERROR_OF_MANY, _MAX_ERROR = 6.5e-2, 4e-2, 0.1
_MANY = 4096
"""Elements from which the errors of rounding average out."""


def factor(largest: float) -> float:
    """The factor that brings `largest` within range."""
    return 2.0 ** math.floor(math.log2(LARGEST / largest))


def rounded(problem: Problem, exact: Tolerance) -> Tolerance:
    """The bounds of D in E4M3, if `exact` are those of the product with D in 16 bits."""
    error = _ERROR_OF_MANY if problem.m * problem.columns >= _MANY else _ERROR
    return replace(exact, error=error, max_error=_MAX_ERROR, amax=exact.max_error)
