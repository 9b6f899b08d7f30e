"""Whose winner answers for a problem that was never measured: the rule, in one place.

A neighbour is of the same kind (`Problem.kind`: operation and batch), at most MAX_DISTANCE away.
Nearer ones come first, and NEIGHBOURS are looked at. The first whose kernel is legal for the
question answers; one that cuBLAS won answers too, as cuBLAS takes every problem.

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
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from gemmsmith.core.config import MAX_DISTANCE, Use
from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem

NEIGHBOURS = 64
"""Neighbours looked at: enough to get past those whose kernels are illegal for the question."""

RUN_DISTANCE = 1.6
"""Farthest problem, in octaves, whose kernel with an activation is run; see above."""

RUN_FLOPS = 16e9
"""Least operations of a product that runs such a kernel; see above."""

_Kind = tuple[str | int, ...]


class Measured(Protocol):
    """A winner, as a client or the service has it."""

    @property
    def problem(self) -> Problem:
        """What it was measured on."""
        ...

    @property
    def use(self) -> Use:
        """What won."""
        ...


T = TypeVar("T")
W = TypeVar("W", bound=Measured)


def answering(problem: Problem, nearest: Iterable[W], is_legal: Callable[[W], bool]) -> W | None:
    """The first of the `nearest` winners, which come in that order, that answers for `problem`.

    `is_legal` tells whether the winner's kernel takes the problem, where there is a kernel.
    """
    for winner in nearest:
        if problem.distance(winner.problem) > MAX_DISTANCE:
            return None
        if winner.use.is_default or is_legal(winner):
            return winner
    return None


def run_reach(problem: Problem) -> float:
    """Octaves within which a neighbour's kernel is run on the problem; 0: only its own winner's."""
    operation = problem.operation
    if operation.grouping is Grouping.ROWS:
        return 0.0 if operation.is_fused else MAX_DISTANCE
    saves_passes = operation.epilogue.activation is not None
    return RUN_DISTANCE if saves_passes and problem.flops >= RUN_FLOPS else 0.0


def runs_there(problem: Problem, kernel: str, won: Iterable[tuple[Problem, str]]) -> bool:
    """Whether a kernel is run on a problem that has no winner: it won below and above, nearby.

    Args:
        problem: of the kernel's operation.
        kernel: its name.
        won: problems of this kind, and the names of the kernels that won on them.
    """
    reach = run_reach(problem)
    near = [there for there, other in won if other == kernel and problem.distance(there) <= reach]
    return any(_fits_in(there, problem) for there in near) and any(
        _fits_in(problem, there) for there in near
    )


def _fits_in(small: Problem, large: Problem) -> bool:
    return small.m <= large.m and small.n <= large.n and small.k <= large.k


class Neighbourhood(Generic[T]):
    """Problems, each with something of its own, of which the nearest are found.

    Logarithms are taken once: thousands of questions are asked of some hundred problems.
    """

    def __init__(self, items: Iterable[tuple[Problem, T]] = ()) -> None:
        self._alike: dict[_Kind, list[tuple[tuple[float, float, float], T]]] = {}
        for problem, item in items:
            self.add(problem, item)

    def add(self, problem: Problem, item: T) -> None:
        """One more; the same problem twice is two."""
        self._alike.setdefault(problem.kind, []).append((problem.log_extents, item))

    def count(self, problem: Problem) -> int:
        """How many there are of the problem's kind."""
        return len(self._alike.get(problem.kind, ()))

    def is_near(self, problem: Problem, reach: float) -> bool:
        """Whether one of the problem's kind is at most `reach` octaves away."""
        here = problem.log_extents
        return any(
            math.dist(here, there) <= reach for there, _ in self._alike.get(problem.kind, ())
        )

    def nearest(self, problem: Problem, limit: int, reach: float) -> list[T]:
        """Those of the problem's kind at most `reach` octaves away, nearest first."""
        alike = self._alike.get(problem.kind, [])
        m, n, k = problem.log_extents
        squares = [(x - m) ** 2 + (y - n) ** 2 + (z - k) ** 2 for (x, y, z), _ in alike]
        within = [index for index, square in enumerate(squares) if square <= reach * reach]
        return [alike[i][1] for i in heapq.nsmallest(limit, within, key=squares.__getitem__)]
