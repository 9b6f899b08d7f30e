"""Which products may have a winner, whatever their number of rows."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from math import inf, log2
from weakref import WeakKeyDictionary

from gemmsmith.core.neighbours import RUN_DISTANCE
from gemmsmith.core.operands import Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.blocks import of_layers
from gemmsmith.ops.engine.engine import Engine

Weights = Container[tuple[int, int]]
"""Sizes [N, K] of layers' weights."""


def may_run(engine: Engine, has: Callable[[Problem], bool]) -> bool:
    """Whether there may be a winner, at present, whose problem has a property."""
    rows = getattr(engine.snapshot, "rows", None)
    return rows is None or any(has(row.problem) for row in rows)


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
    return _fewest(engine, lambda problem: (problem.n, problem.k) in weights)


def fewest_fused(engine: Engine, weights: frozenset[tuple[int, int]]) -> float:
    """As `fewest_rows`, of a layer's products with what follows them, and of their gradients.

    Either extent of a weight may be a product's N, and half of it too: a gate's weight may have the
    rows of both factors. Neighbours' kernels run as well, between a smaller problem and a larger
    (`gemmsmith.core.neighbours`).
    """
    snapshot, answers = _of_layers.get(engine, (None, {}))
    if snapshot is not engine.snapshot:
        snapshot, answers = _of_layers[engine] = engine.snapshot, {}
    if weights not in answers:
        pairs = [pair for n, k in weights for pair in ((n, k), (k, n), (n // 2, k), (k // 2, n))]
        exact, smaller, larger = (
            _fewest(engine, partial(_reaches, [pair for pair in pairs if 0 not in pair], way))
            for way in (0, -1, 1)
        )
        answers[weights] = exact if larger == inf else min(exact, smaller)
    return answers[weights]


_Answers = dict[frozenset[tuple[int, int]], float]
_of_layers: WeakKeyDictionary[Engine, tuple[object, _Answers]] = WeakKeyDictionary()
"""Answers of `fewest_fused`, with the winners of which they are true."""


def _fewest(engine: Engine, has: Callable[[Problem], bool]) -> float:
    rows = getattr(engine.snapshot, "rows", None)
    if engine.is_invariant or engine.refreshes or rows is None:
        return 0
    return min((row.problem.m for row in rows if has(row.problem)), default=inf)


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
