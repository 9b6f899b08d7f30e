"""Predicts fused problems of recognized layers from the sizes of the plain products that ran.

A capture of a whole program does not patch its modules: the program could notice it, and compiled
code does not call modules. So a product is assigned to a recognized layer by the size of its
weight. If other linear layers have weights of the same size, the layer gets its share of the calls.
Products that compute gradients show whether a layer is trained.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from gemmsmith.core.operation import Epilogue, Layout
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.ops.models.layers import second
from gemmsmith.ops.models.recipes import (
    FeedForwardRecipe,
    First,
    Recipe,
    ResidualRecipe,
    SequenceRecipe,
    is_linear,
    is_transposed,
    recipe_of,
)
from gemmsmith.ops.products.feedforward import backward_epilogues


class _Linear(NamedTuple):
    """Linear layers of the same size.

    Attributes:
        n, k: size of their weights, [N, K].
        layout: layout of their products.
    """

    n: int
    k: int
    layout: Layout

    @classmethod
    def of(cls, layer: Any) -> _Linear:
        rows, columns = layer.weight.shape
        if is_transposed(layer):
            return cls(columns, rows, Layout.TT)
        return cls(rows, columns, Layout.TN)

    @property
    def backward(self) -> _Linear:
        """The product that computes the gradient of their input."""
        return _Linear(self.k, self.n, Layout.TN if self.layout is Layout.TT else Layout.TT)


@dataclass(frozen=True, kw_only=True)
class _Fusion:
    """The epilogues that could follow a product.

    Attributes:
        inference: without gradients; None if there is no epilogue.
        training: with gradients.
        doubled: whether the product has two weights, of gate and up.
    """

    inference: Epilogue | None
    training: Epilogue | None
    doubled: bool = False


class Foreseen:
    """The fusions of all models that were inspected."""

    def __init__(self) -> None:
        self._layers: dict[_Linear, int] = {}
        self._fusions: dict[_Linear, Counter[_Fusion]] = {}

    def look(self, modules: Iterable[nn.Module]) -> None:
        """Inspect the current modules. Results for sizes that have disappeared are kept."""
        layers: Counter[_Linear] = Counter()
        fusions: dict[_Linear, Counter[_Fusion]] = {}
        for module in modules:
            with suppress(Exception):  # a program's own module may raise anything
                if is_linear(module):
                    linear = _Linear.of(module)
                    layers.update((linear, linear.backward))
                for linear, fusion in _fusions(module, recipe_of(module)):
                    fusions.setdefault(linear, Counter())[fusion] += 1
        self._layers.update(layers)
        self._fusions.update({linear: fusions.get(linear, Counter()) for linear in layers})

    def problems(self, ran: Counter[Problem]) -> Counter[Problem]:
        """The fused problems that could have run instead of the plain ones that ran."""
        fused: Counter[Problem] = Counter()
        sizes = {(problem.m, problem.n, problem.k, problem.layout) for problem in ran}
        calls: Counter[Problem] = Counter()
        for problem, count in ran.items():
            # torch adds a bias within the product, compiled code after it: count both as plain.
            operation = problem.operation
            is_plain = operation.epilogue.is_torchs
            if is_plain and problem.batch == 1 and not operation.is_grouped:
                calls[_with_epilogue(problem, Epilogue.NONE)] += count
        for problem, count in calls.items():
            linear = _Linear(problem.n, problem.k, problem.layout)
            trained = bool(_gradients(problem, linear) & sizes)
            for fusion, layers in self._fusions.get(linear, Counter()).items():
                epilogue = fusion.training if trained else fusion.inference
                share = count * layers / self._layers[linear]
                if epilogue is not None:
                    with suppress(InvalidProblem):
                        fused_problem = _with_epilogue(problem, epilogue, doubled=fusion.doubled)
                        fused[fused_problem] += max(1, round(share))
        return fused


def _with_epilogue(problem: Problem, epilogue: Epilogue, *, doubled: bool = False) -> Problem:
    """The product with an epilogue, and two weights if `doubled`; may raise InvalidProblem."""
    operation = replace(problem.operation, epilogue=epilogue)
    return Problem.of(operation, problem.m, problem.n * (1 + doubled), problem.k)


def _gradients(problem: Problem, linear: _Linear) -> set[tuple[int, int, int, Layout]]:
    """The sizes of the products that compute the gradients of a layer's input and weight."""
    m, n, k = problem.m, problem.n, problem.k
    return {
        (m, k, n, linear.backward.layout),
        (n, k, m, Layout.NT),
        (k, n, m, Layout.NT),
    }


def _fusions(module: nn.Module, recipe: Recipe | None) -> Iterator[tuple[_Linear, _Fusion]]:
    """The fusions that a module could run, with the linear layer that each belongs to."""
    if isinstance(recipe, ResidualRecipe):
        layer = _child(module, recipe.layer)
        epilogue = Epilogue.made_of(bias=layer.bias is not None, residual=True)
        yield _Linear.of(layer), _Fusion(inference=epilogue, training=epilogue)
    elif isinstance(recipe, FeedForwardRecipe):
        up = None if recipe.up is None else _child(module, recipe.up)
        yield from _activated(module, recipe.first, up, recipe.then, is_gated=recipe.is_gated)
    elif isinstance(recipe, SequenceRecipe):
        names, pairs = list(module._modules), {pair.layer for pair in recipe.pairs}
        for first in recipe.pairs:
            # The next layer with an activation is fused by itself.
            rest = itertools.takewhile(
                lambda name: name not in pairs, names[names.index(first.layer) + 2 :]
            )
            yield from _activated(module, first, None, rest, is_gated=False)


def _activated(
    module: nn.Module, first: First, up: Any, then: Iterable[str], *, is_gated: bool
) -> Iterator[tuple[_Linear, _Fusion]]:
    """The fusions of a layer with an activation, and of the layer after it."""
    layer = _child(module, first.layer)
    bias = layer.bias
    if not (is_gated and bias is not None):
        inference, training = (
            Epilogue.made_of(
                bias=bias is not None, activation=first.activation, gate=is_gated, aux=aux
            )
            for aux in (False, True)
        )
        yield (
            _Linear.of(layer),
            _Fusion(inference=inference, training=training, doubled=up is not None),
        )
    down, *_ = second(module, then)
    choices = backward_epilogues(first.activation, is_gated=is_gated, bias=bias)
    if down is not None and choices:
        follows = _Fusion(inference=choices[0], training=choices[0])
        yield _Linear.of(down).backward, follows


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]
