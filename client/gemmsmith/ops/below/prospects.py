"""Which products may have a winner, whatever their number of rows."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from math import inf, log2
from typing import NamedTuple
from weakref import WeakKeyDictionary

from gemmsmith.core.neighbours import RUN_DISTANCE
from gemmsmith.core.operands import Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.blocks import of_layers
from gemmsmith.ops.engine.engine import Engine

Weights = Container[tuple[int, int]]
"""Sizes [N, K] of layers' weights."""


def may_run(engine: Engine, has: Callable[[Problem], bool]) -> bool:
    """Whether there may be a kernel that won, at present, on a problem with a property."""
    problems, _ = _known(engine)
    return problems is None or any(map(has, problems))


def may_add_biases(engine: Engine, weights: Weights | None) -> bool:
    """Whether torch's `addmm` is replaced: a winner adds a bias, or torch must not compute.

    `weights` are those of the layers that are replaced. None: all.
    """

    def adds(problem: Problem) -> bool:
        epilogue = problem.operation.epilogue
        is_bias = epilogue.is_torchs and epilogue.has_bias
        return is_bias and (weights is None or (problem.n, problem.k) in weights)

    return engine.is_invariant or may_run(engine, adds)


def may_win(engine: Engine, has: Callable[[Problem], bool]) -> bool:
    """Whether there may be a winner with a property, at present or after a refresh."""
    return engine.is_invariant or engine.refreshes or may_run(engine, has)


def may_replace(engine: Engine, weights: frozenset[tuple[int, int]] | None) -> bool:
    """Whether there may be a winner for a product of `of_layers`. `weights` of None are all."""

    def has(problem: Problem) -> bool:
        m, n, k = problem.m, problem.n, problem.k
        return weights is None or of_layers(weights, (m, k), (k, n))

    return may_win(engine, has)


def fewest_rows(engine: Engine, weights: frozenset[tuple[int, int]]) -> float:
    """The least M of a winner for layers with these weights. Infinite if there is no winner.

    Returns 0 if that is not known. `weights` are sizes [N, K].
    """
    _, answers = _known(engine)
    if (weights, "plain") not in answers:
        fewest = _fewest(engine, lambda problem: (problem.n, problem.k) in weights)
        answers[weights, "plain"] = fewest
    return answers[weights, "plain"]


def fewest_of_experts(engine: Engine, weights: frozenset[tuple[int, int]]) -> float:
    """As `fewest_rows`, of all experts' rows together, for any product of their two passes.

    `weights` are one expert's. Neighbours' kernels run between two numbers of rows that won.
    """
    extents = {extent for pair in weights for extent in pair}

    def has(problem: Problem) -> bool:
        return problem.operation.is_grouped and problem.n in extents

    _, answers = _known(engine)
    if (weights, "experts") not in answers:
        answers[weights, "experts"] = _fewest(engine, has)
    return answers[weights, "experts"]


def fewest_fused(engine: Engine, weights: frozenset[tuple[int, int]]) -> float:
    """As `fewest_rows`, of a layer's products with what follows them, and of their gradients.

    Either extent of a weight may be a product's N, and half of it too: a gate's weight may have the
    rows of both factors. Neighbours' kernels run as well, between a smaller problem and a larger
    (`gemmsmith.core.neighbours`).
    """
    _, answers = _known(engine)
    if (weights, "fused") not in answers:
        pairs = [pair for n, k in weights for pair in ((n, k), (k, n), (n // 2, k), (k // 2, n))]
        exact, smaller, larger = (
            _fewest(engine, partial(_reaches, [pair for pair in pairs if 0 not in pair], way))
            for way in (0, -1, 1)
        )
        answers[weights, "fused"] = exact if larger == inf else min(exact, smaller)
    return answers[weights, "fused"]


class _Prospects(NamedTuple):
    """The problems on which kernels won, None if they are not known, and answers for layers."""

    problems: tuple[Problem, ...] | None
    answers: dict[tuple[frozenset[tuple[int, int]], str], float]


_snapshots: WeakKeyDictionary[Engine, tuple[object, _Prospects]] = WeakKeyDictionary()


def _known(engine: Engine) -> _Prospects:
    snapshot = engine.snapshot
    before, known = _snapshots.get(engine, (None, None))
    if known is None or before is not snapshot:
        rows = getattr(snapshot, "rows", None)
        won = None if rows is None else tuple(row.problem for row in rows if not row.use.is_default)
        _, known = _snapshots[engine] = snapshot, _Prospects(won, {})
    return known


def _fewest(engine: Engine, has: Callable[[Problem], bool]) -> float:
    problems, _ = _known(engine)
    if engine.is_invariant or problems is None:
        return 0
    rows = (getattr(of, of.operation.free_extent) for of in problems if has(of))
    return min(rows, default=inf)


def _reaches(pairs: list[tuple[int, int]], way: int, problem: Problem) -> bool:
    """Whether a kernel of the problem may run a layer with N and K of one of these pairs.

    `way`: 0: the problem itself has them. -1 or 1: it is a neighbour, no larger or no smaller.
    """
    epilogue, there = problem.operation.epilogue, (problem.columns, problem.k)
    if epilogue.is_torchs or problem.operation.is_grouped:
        return False
    if not way:
        return there in pairs
    return epilogue.activation is not None and any(
        all(0 <= way * log2(b / a) <= RUN_DISTANCE for a, b in zip(pair, there, strict=True))
        for pair in pairs
    )


def may_group(engine: Engine) -> bool:
    """Whether there may be a winner for grouped products: neighbours' kernels run other sizes."""
    return may_win(engine, lambda problem: problem.operation.is_grouped)


def may_scale(engine: Engine) -> bool:
    """Whether there may be a winner for FP8 operands with factors."""
    return may_win(engine, lambda problem: problem.operation.scaling is not Scaling.NONE)
