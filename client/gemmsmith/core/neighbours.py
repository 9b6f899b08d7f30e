"""Whose winner answers for a problem that was never measured: the rule, in one place.

A neighbour is of the same kind (`Problem.kind`: operation and batch), at most MAX_DISTANCE away.
The nearest NEIGHBOURS are tried in order of distance. The first whose kernel is legal for the
problem answers; one that cuBLAS won answers too, as cuBLAS takes every problem.

To answer is not to be run. A tile that fits one size leaves SMs idle at the next: of 199 kernels
that won on a plain product, or on one with a bias or a residual, and were timed on a neighbour's,
59% were slower there than the default, the worst by a factor of three. Those that take an
activation or a gate along save passes over memory at any size: of 128, five were slower, each of
them on a product of less than 16 GFLOP or more than 1.6 octaves away (H200,
benchmarks/neighbours.py, 2026-11-25). So these alone are run, and grouped ones by rows, whose
neighbours differ in the number of tokens only: five of five were faster there. Two of two by depth
(weight gradients) were slower. Grouped ones with a gate were not timed on neighbours' problems.

Even these are run only between two problems that the same kernel won, one of them no larger in any
extent and one no smaller. Of the kernels above with an activation or a gate, 16 were timed between
two such problems, and the slowest gained 1.119 ×. Where different kernels had won on both sides,
two of 61 were slower, one of them by a factor of two. Beyond what was tuned nothing tells how a
kernel fares.

An operation that demands an order of sums is answered otherwise, because torch's own operator does
not have that order: every problem is answered, near or far, and the kernel is run. It is the kernel
of the most tokens tuned below, else of the fewest above, of the same weight. Where no kernel of the
weight is legal, it is that of the nearest other weight. Kernels of one order give the same bits, so
this costs time at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, log2
from typing import Generic, Protocol, TypeVar

from gemmsmith.core.config import MAX_DISTANCE, Use
from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem

NEIGHBOURS = 64
"""Enough to get past those whose kernels are illegal for the problem."""

RUN_DISTANCE = 1.6
"""Farthest problem, in octaves, whose kernel with an activation is run; see above."""

RUN_FLOPS = 16e9
"""Least operations of a product that runs such a kernel; see above."""

_Kind = tuple[str | int, ...]
_Octaves = tuple[int, int, int]
_Sizes = tuple[int, int, int, int]


class Measured(Protocol):
    """A winner, as the library, the tuner or the service has it."""

    @property
    def use(self) -> Use:
        """What won."""

    @property
    def kernel_name(self) -> str | None:
        """Name of the best kernel; None if there was no candidate."""


T = TypeVar("T")
W = TypeVar("W", bound=Measured)


def answering(
    problem: Problem, near: Sequence[tuple[Problem, W]], is_legal: Callable[[W], bool]
) -> tuple[Problem, W, Use] | None:
    """The neighbour that answers for `problem`, its winner, and what is to be run.

    `near` are problems of the same kind with their winners, nearest first. `is_legal` says whether
    a winner's kernel takes the problem; it is called only if the kernel won.
    """
    if problem.operation.summation is not None:
        return _of_the_order(problem, near, is_legal)
    for there, winner in near:
        if problem.distance(there) > MAX_DISTANCE:
            return None
        if winner.use.is_default:
            return there, winner, winner.use
        if is_legal(winner):
            won = [other for other, by in near if _won(by, winner.kernel_name)]
            return there, winner, winner.use if _runs_between(problem, won) else Use.CUBLAS
    return None


def _of_the_order(
    problem: Problem, near: Sequence[tuple[Problem, W]], is_legal: Callable[[W], bool]
) -> tuple[Problem, W, Use] | None:
    """As `answering`, of an operation that demands an order. `near` are all of the kind."""
    extent = problem.operation.free_extent
    here = getattr(problem, extent)

    def preference(item: tuple[Problem, W]) -> tuple[bool, bool, float]:
        there, _ = item
        if there.weight != problem.weight:
            return True, there.batch != problem.batch, problem.distance(there)
        tokens = getattr(there, extent)
        return False, tokens > here, abs(tokens - here)

    for there, winner in sorted(near, key=preference):
        if not winner.use.is_default and is_legal(winner):
            return there, winner, winner.use
    return None


def run_reach(problem: Problem) -> float:
    """Octaves within which a neighbour's kernel is run on the problem; 0: only its own winner's."""
    operation = problem.operation
    if operation.summation is not None:
        return inf
    if operation.grouping is Grouping.ROWS:
        return 0.0 if operation.is_fused else MAX_DISTANCE
    saves_passes = operation.epilogue.activation is not None
    return RUN_DISTANCE if saves_passes and problem.flops >= RUN_FLOPS else 0.0


def _won(winner: Measured, kernel: str | None) -> bool:
    return winner.kernel_name == kernel and not winner.use.is_default


def _runs_between(problem: Problem, won: Iterable[Problem]) -> bool:
    """Whether a kernel that won on these problems is run on another: it won below and above."""
    reach = run_reach(problem)
    near = [there for there in won if reach and problem.distance(there) <= reach]
    return any(_fits_in(there, problem) for there in near) and any(
        _fits_in(problem, there) for there in near
    )


def _fits_in(small: Problem, large: Problem) -> bool:
    return small.m <= large.m and small.n <= large.n and small.k <= large.k


class Neighbourhood(Generic[T]):
    """Problems, an item for each, of which the nearest are returned.

    Threads that share one need a lock.
    """

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[_Octaves, dict[_Sizes, tuple[int, T]]]] = {}

    def put(self, problem: Problem, order: int, item: T) -> None:
        """Add a problem, or replace its item. Of equal distances, the lower `order` is nearer."""
        sizes = problem.m, problem.n, problem.k, problem.batch
        octaves = problem.m.bit_length(), problem.n.bit_length(), problem.k.bit_length()
        cells = self._kinds.setdefault(problem.kind, {})
        cells.setdefault(octaves, {})[sizes] = order, item

    def count(self, problem: Problem) -> int:
        return sum(map(len, self._kinds.get(problem.kind, {}).values()))

    def nearest(self, problem: Problem, limit: int, reach: float) -> list[tuple[Problem, T]]:
        """Problems of the problem's kind, `reach` octaves away at most, nearest first.

        All of the kind if the operation demands an order, as each of them may answer.
        """
        if problem.operation.summation is not None:
            limit, reach = self.count(problem), inf
        here, most = problem.log_extents, reach * reach
        x, y, z = here
        cells = self._kinds.get(problem.kind, {})
        best: list[tuple[float, int, _Sizes, T]] = []
        # A cell has the problems of one octave of M, N and K. The nearest cells are read first,
        # until no problem of the next cell can be among the nearest: 10 µs among hundreds, 0.4 ms
        # among 18,000.
        for gap, octaves in sorted((_gap(here, octaves), octaves) for octaves in cells):
            if gap > most:
                break
            for sizes, (order, item) in cells[octaves].items():
                m, n, k = log2(sizes[0]) - x, log2(sizes[1]) - y, log2(sizes[2]) - z
                square = m * m + n * n + k * k
                if square <= most:
                    best.append((square, order, sizes, item))
            if len(best) >= limit:
                best.sort()
                del best[limit:]
                most = best[-1][0]
        best.sort()
        return [(_of_sizes(sizes, problem), item) for *_, sizes, item in best]


def _of_sizes(sizes: _Sizes, like: Problem) -> Problem:
    m, n, k, batch = sizes
    return Problem.unchecked(m, n, k, batch=batch, dtype=like.dtype, layout=like.layout)


def _gap(here: tuple[float, float, float], octaves: _Octaves) -> float:
    """Squared distance of a cell, which has logarithms from `octaves` - 1 to `octaves`."""
    (x, y, z), (a, b, c) = here, octaves
    m, n, k = max(x - a, a - 1 - x, 0.0), max(y - b, b - 1 - y, 0.0), max(z - c, c - 1 - z, 0.0)
    return m * m + n * n + k * k
