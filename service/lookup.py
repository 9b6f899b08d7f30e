"""From a question to an answer: the exact winner, else the nearest neighbour's that is legal.

Pure over its source: nothing is measured, compiled or written. A neighbour has the question's
element types, layout, batch and device. Its figures stay those of the problem that was measured,
and the answer says which that is; nothing is extrapolated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from gemmsmith.answer import Answer, Config, Match, Use
from gemmsmith.launch import Candidate
from gemmsmith.problem import Problem
from tuner.space import refusal, splits_refusal
from tuner.trial import Winner

MAX_DISTANCE = 2.0
"""Farthest neighbour: a factor of 4 in one of M, N, K, or of 2.2 in each.

Beyond that the number of tiles, and with it the best tile, is another. Not measured yet.
"""

NEIGHBOURS = 64
"""Neighbours looked at: enough to get past those whose kernels are illegal for the question."""

PackOf = Callable[[str], str | None]
"""The pack that holds a kernel, by the kernel's name."""


class WinnerSource(Protocol):
    """What a lookup reads: the store, or a snapshot of it."""

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        ...

    def near_winners(self, problem: Problem, device_slug: str, limit: int) -> Sequence[Winner]:
        """Current winners of the same types, layout, batch and device, nearest first."""
        ...


class Snapshot:
    """A device's winners in memory, for many lookups in one call that must agree."""

    def __init__(self, winners: Iterable[Winner]) -> None:
        self._exact = {(winner.problem, winner.device.slug): winner for winner in winners}
        # Logarithms are taken once: thousands of questions are asked of some hundred winners.
        self._alike: dict[tuple[str, ...], list[tuple[float, float, float, Winner]]] = {}
        for winner in self._exact.values():
            alike = self._alike.setdefault(_kind(winner.problem, winner.device.slug), [])
            alike.append((*winner.problem.log_extents, winner))

    def winner(self, problem: Problem, device_slug: str) -> Winner | None:
        """The current winner for exactly this problem."""
        return self._exact.get((problem, device_slug))

    def near_winners(self, problem: Problem, device_slug: str, limit: int) -> list[Winner]:
        """Current winners of the same types, layout, batch and device, nearest first."""
        alike = self._alike.get(_kind(problem, device_slug), [])
        m, n, k = problem.log_extents
        squares = [(x - m) ** 2 + (y - n) ** 2 + (z - k) ** 2 for x, y, z, _ in alike]
        nearest = heapq.nsmallest(limit, range(len(alike)), key=squares.__getitem__)
        return [alike[index][3] for index in nearest]


def find(
    source: WinnerSource, problem: Problem, device_slug: str, *, exact: bool, pack_of: PackOf
) -> Answer | None:
    """The best answer that is known for `problem` on the device; None: tune it.

    A neighbour whose answer is cuBLAS answers too: cuBLAS takes every problem. Its CUTLASS
    candidate comes along only where it is legal for the question.
    """
    winner = source.winner(problem, device_slug)
    if winner is not None:
        return _answer(problem, winner, Match.EXACT, pack_of)
    if exact:
        return None
    for neighbour in source.near_winners(problem, device_slug, limit=NEIGHBOURS):
        if problem.distance(neighbour.problem) > MAX_DISTANCE:
            return None
        if neighbour.candidate is not None and not _legal(neighbour.candidate, problem):
            if neighbour.use is Use.CUTLASS:
                continue
            neighbour = replace(
                neighbour, candidate=None, statistics=None, speedup=None, correctness=None, ties=()
            )
        return _answer(problem, neighbour, Match.NEAREST, pack_of)
    return None


def _legal(candidate: Candidate, problem: Problem) -> bool:
    """Whether the kernel takes the problem, and can split its K as the launch says."""
    kernel, launch = candidate.kernel, candidate.launch
    return refusal(kernel, problem) is None and splits_refusal(kernel, launch, problem) is None


def _kind(problem: Problem, device_slug: str) -> tuple[str, ...]:
    return (device_slug, problem.dtype, problem.layout, str(problem.batch))


def _answer(problem: Problem, winner: Winner, match: Match, pack_of: PackOf) -> Answer:
    config = None
    if winner.candidate is not None:
        kernel = winner.candidate.kernel
        # A kernel compiled after the promotion has a pack that the winner does not know of.
        config = Config(
            kernel=kernel,
            launch=winner.candidate.launch,
            pack=winner.pack or pack_of(kernel.name),
        )
    return Answer(
        problem=problem,
        match=match,
        measured=winner.problem,
        distance=0.0 if match is Match.EXACT else problem.distance(winner.problem),
        use=winner.use,
        config=config,
        statistics=winner.statistics,
        baseline=winner.baseline,
        speedup=winner.speedup,
        correctness=winner.correctness,
        conditions=winner.conditions,
        ties=winner.ties,
        device=winner.device,
        environment=winner.environment,
        revision=winner.revision,
        promoted_at=winner.promoted_at,
        replayed=winner.replayed,
        baseline_kernels=winner.baseline_kernels,
    )
