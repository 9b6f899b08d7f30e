"""Which products may have a winner, whatever their number of rows."""

from __future__ import annotations

from collections.abc import Callable, Container

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


def may_multiply(engine: Engine, weights: Weights) -> bool:
    """Whether there may be a winner for the output of a layer with one of these weights."""
    return may_win(engine, lambda problem: (problem.n, problem.k) in weights)


def may_group(engine: Engine) -> bool:
    """Whether there may be a winner for grouped products: neighbours' kernels run other sizes."""
    return may_win(engine, lambda problem: problem.operation.is_grouped)


def may_scale(engine: Engine) -> bool:
    """Whether there may be a winner for FP8 operands with factors."""
    return may_win(engine, lambda problem: problem.operation.scaling is not Scaling.NONE)
