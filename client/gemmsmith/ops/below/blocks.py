"""Which products of torch's operators are replaced at present."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gemmsmith.ops.engine.forms import Spec

Weights = frozenset[tuple[int, int]]
"""Sizes of linear layers' weights: (out_features, in_features)."""
Includes = Callable[[Weights, Sequence[int], Sequence[int]], bool]


class Blocks:
    """The open blocks, each for the products with some weights, or for all products.

    `includes(weights, sizes of a, sizes of b)`: whether the product may be one with such weights.

    Attributes:
        only: weights of all of them; None: every product is replaced. Empty without open blocks.
    """

    def __init__(self, includes: Includes | None = None) -> None:
        self._includes = includes or of_layers
        self._open: list[Weights | None] = []
        self.only: Weights | None = frozenset()

    @contextmanager
    def opened(self, only: Weights | None) -> Iterator[None]:
        """Open a block. Blocks may overlap: each adds to what the others replace."""
        self._open.append(only)
        self._add_up()
        try:
            yield
        finally:
            self._open.remove(only)
            self._add_up()

    def _add_up(self) -> None:
        weights = [only for only in self._open if only is not None]
        self.only = frozenset().union(*weights) if len(weights) == len(self._open) else None

    def hold(self, a: torch.Tensor | Spec, b: torch.Tensor | Spec) -> bool:
        return self.only is None or self._includes(self.only, a.shape, b.shape)


def of_layers(weights: Weights, a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether a product of these sizes may be one of linear layers with these weights.

    That is a[M, K] · b[K, N] as a layer's output or as the gradient of its input or of its weight.
    The gradients may be transposed: torch computes them so if the other factor is column-major.
    """
    if len(a) != 2:
        return False
    (m, k), n = a, b[1]
    return not weights.isdisjoint(((n, k), (k, n), (k, m), (m, n), (n, m)))


def of_experts(weights: Weights, a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether a grouped product may be an output or a gradient of experts with these weights."""
    rows, columns = b[-2:] if len(b) == 3 else (a[0], b[-1])
    return len(a) == 2 and ((rows, columns) in weights or (columns, rows) in weights)
