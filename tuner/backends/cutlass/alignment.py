"""Which copy instructions can read and store a problem's rows, by their alignment."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from gemmsmith.core.legality import MAX_GRID_YZ, MAX_TILES
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture
from tuner.backends.cutlass.operation import TMA_BYTES
from tuner.backends.cutlass.wgmma import CPASYNC_MIN_BYTES

_MOST_ELEMENTS = 32
"""The largest multiple that a rule requires: 16 bytes of 8-bit elements, for both gate and up."""


def tma_reads(problem: Problem) -> bool:
    return _rows_aligned(problem, TMA_BYTES)


def tma_stores(problem: Problem) -> bool:
    """Whether TMA can store D: all its rows start at multiples of 16 bytes."""
    return problem.columns * problem.operation.d.bytes % TMA_BYTES == 0


def cpasync_alignment(problem: Problem) -> int:
    """Elements of A's and B's rows that one `cp.async` can copy; 0 if it cannot copy them."""
    width = problem.operation.a.bytes
    for size in (TMA_BYTES, 8, CPASYNC_MIN_BYTES):
        if _rows_aligned(problem, size):
            return size // width
    return 0


def _rows_aligned(problem: Problem, size: int) -> bool:
    alignment = size // problem.operation.a.bytes
    return problem.contiguous_a % alignment == 0 and problem.contiguous_b % alignment == 0


def of_kernels(problem: Problem) -> Problem:
    """The same problem with the operation that kernels are built for."""
    dtype = problem.operation.of_kernels.dtype
    return problem if dtype == problem.dtype else replace(problem, dtype=dtype)


def alike(problem: Problem, arch: Architecture) -> Problem:
    """A small problem for which every rule gives the same result, as a key for caches.

    The rules depend on the alignment of rows, up to 32 elements, on whether there is a batch, and
    on the number of tiles. Returns `problem` itself if the number of tiles may matter: if tiles of
    8×8, padded to the widest cluster, would be more than a grid holds.
    """
    side = arch.max_cluster_side
    tiles_m, tiles_n = problem.m // 8 + side, problem.n // 8 + side
    if max(tiles_m, tiles_n, problem.batch) > MAX_GRID_YZ:
        return problem
    if tiles_m * tiles_n * problem.batch > MAX_TILES:
        return problem
    return replace(
        problem,
        m=gcd(problem.m, _MOST_ELEMENTS),
        n=gcd(problem.n, _MOST_ELEMENTS),
        k=gcd(problem.k, _MOST_ELEMENTS),
        batch=min(problem.batch, 2),
    )
