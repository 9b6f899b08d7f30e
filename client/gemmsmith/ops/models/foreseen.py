"""What recognized layers could run by one kernel, by the sizes of the products that ran.

A capture of a whole program leaves its modules alone: whatever a layer shows, its program could
notice, and compiled code has no modules. So a product is taken for a recognized layer's by the
size of its weight. Where other linear layers have weights of that size, the layer gets its share of
the calls. Whether gradients are wanted is seen by their products.
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
    weight_of,
)
from gemmsmith.ops.products.feedforward import backward_epilogues


class _Linear(NamedTuple):
    """Linear layers of one size.

    Attributes:
        n, k: of their weights [N, K].
        layout: of their products.
    """

    n: int
    k: int
    layout: Layout

    @classmethod
    def of(cls, layer: nn.Module) -> _Linear:
        """That of a layer."""
        n, k = weight_of(layer).shape
        return cls(n, k, Layout.TT if is_transposed(layer) else Layout.TN)

    @property
    def backward(self) -> _Linear:
        """As the product that gives the gradient of their input."""
        return _Linear(self.k, self.n, Layout.TN if self.layout is Layout.TT else Layout.TT)


@dataclass(frozen=True, kw_only=True)
class _Fusion:
    """What could follow a product.

    Attributes:
        inference: where no gradient is wanted; None: nothing.
        training: where one is.
        doubled: the product is of two weights, gate's and up's.
    """

    inference: Epilogue | None
    training: Epilogue | None
    doubled: bool = False


class Foreseen:
    """The fusions of all models that were looked at."""

    def __init__(self) -> None:
        self._layers: dict[_Linear, int] = {}
        self._fusions: dict[_Linear, Counter[_Fusion]] = {}

    def look(self, modules: Iterable[nn.Module]) -> None:
        """See what models are now; of sizes that are gone, what was seen before stays."""
        layers: Counter[_Linear] = Counter()
        fusions: dict[_Linear, Counter[_Fusion]] = {}
        for module in modules:
            with suppress(Exception):  # a module of the program's may raise anything
                if is_linear(module):
                    linear = _Linear.of(module)
                    layers.update((linear, linear.backward))
                for linear, fusion in _fusions(module, recipe_of(module)):
                    fusions.setdefault(linear, Counter())[fusion] += 1
        self._layers.update(layers)
        self._fusions.update({linear: fusions.get(linear, Counter()) for linear in layers})

    def problems(self, ran: Counter[Problem]) -> Counter[Problem]:
        """The fused problems that could have run, by the plain ones that did."""
        fused: Counter[Problem] = Counter()
        sizes = {(problem.m, problem.n, problem.k, problem.layout) for problem in ran}
        calls: Counter[Problem] = Counter()
        for problem, count in ran.items():
            # A bias is torch's within the product, or compiled code's after it.
            operation = problem.operation
            is_plain = operation.epilogue in (Epilogue.NONE, Epilogue.BIAS)
            if is_plain and problem.batch == 1 and not operation.is_grouped:
                calls[_followed(problem, Epilogue.NONE)] += count
        for problem, count in calls.items():
            linear = _Linear(problem.n, problem.k, problem.layout)
            trained = bool(_gradients(problem, linear) & sizes)
            for fusion, layers in self._fusions.get(linear, Counter()).items():
                epilogue = fusion.training if trained else fusion.inference
                share = count * layers / self._layers[linear]
                if epilogue is not None:
                    with suppress(InvalidProblem):
                        followed = _followed(problem, epilogue, doubled=fusion.doubled)
                        fused[followed] += max(1, round(share))
        return fused


def _followed(problem: Problem, epilogue: Epilogue, *, doubled: bool = False) -> Problem:
    """The same product with that epilogue, of one weight or of two.

    Raises:
        InvalidProblem: there is no such operation.
    """
    operation = replace(problem.operation, epilogue=epilogue)
    return Problem.of(operation, problem.m, problem.n * (1 + doubled), problem.k)


def _gradients(problem: Problem, linear: _Linear) -> set[tuple[int, int, int, Layout]]:
    """The products that give the gradients of a layer's input and weight."""
    m, n, k = problem.m, problem.n, problem.k
    return {
        (m, k, n, linear.backward.layout),
        (n, k, m, Layout.NT),
        (k, n, m, Layout.NT),
    }


def _fusions(module: nn.Module, recipe: Recipe | None) -> Iterator[tuple[_Linear, _Fusion]]:
    """What one kernel could compute of a module, and after which of its layers."""
    if isinstance(recipe, ResidualRecipe):
        layer = _child(module, recipe.layer)
        epilogue = Epilogue.made_of(bias=layer.bias is not None, residual=True)
        yield _Linear.of(layer), _Fusion(inference=epilogue, training=epilogue)
    elif isinstance(recipe, FeedForwardRecipe):
        up = None if recipe.up is None else _child(module, recipe.up)
        then = [_child(module, name) for name in recipe.then]
        yield from _activated(module, recipe.first, up, then, is_gated=recipe.is_gated)
    elif isinstance(recipe, SequenceRecipe):
        names, pairs = list(module._modules), {one.layer for one in recipe.pairs}
        for first in recipe.pairs:
            # Up to the next layer with an activation, which is another kernel's.
            rest = itertools.takewhile(
                lambda name: name not in pairs, names[names.index(first.layer) + 2 :]
            )
            then = [_child(module, name) for name in rest]
            yield from _activated(module, first, None, then, is_gated=False)


def _activated(
    module: nn.Module, first: First, up: Any, then: list[Any], *, is_gated: bool
) -> Iterator[tuple[_Linear, _Fusion]]:
    """Of a layer with an activation, and of the layer that its value goes to."""
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
    down, _ = second(then)
    choices = backward_epilogues(first.activation, is_gated=is_gated, bias=bias)
    if down is not None and choices:
        follows = _Fusion(inference=choices[0], training=choices[0])
        yield _Linear.of(down).backward, follows


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]
