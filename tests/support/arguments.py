"""The arguments of a launch through the C ABI."""

from __future__ import annotations

from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import Arguments


def packed_arguments(
    problem: Problem,
    *,
    a: int | None = None,
    b: int | None = None,
    d: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    sm_count: int = 132,
) -> Arguments:
    """Arguments of a problem with densely packed operands at these addresses; C is D."""
    m, n, k, columns = problem.m, problem.n, problem.k, problem.columns
    return Arguments(
        m=m,
        n=n,
        k=k,
        batch=problem.batch,
        a=a,
        b=b,
        c=d,
        d=d,
        lda=problem.contiguous_a,
        ldb=problem.contiguous_b,
        ldc=columns,
        ldd=columns,
        batch_stride_a=m * k,
        batch_stride_b=n * k,
        batch_stride_c=m * columns,
        batch_stride_d=m * columns,
        alpha=alpha,
        beta=beta,
        raster_order=0,
        swizzle=1,
        decomposition=0,
        splits=1,
        device=0,
        sm_count=sm_count,
    )
