"""Which products of torch's operators are replaced at present."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gemmsmith.ops.engine.forms import Spec

Weights = frozenset[tuple[int, int]]
"""Sizes of linear layers' weights: (out_features, in_features)."""


class Blocks:
    """The open blocks, each for the products with some weights, or for all products.

    Attributes:
        only: weights of all of them; None: every product is replaced. Empty without open blocks.
    """

    def __init__(self) -> None:
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
        return self.only is None or of_layers(self.only, a.shape, b.shape)


def of_layers(weights: Weights, a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether a product of these sizes may be one of linear layers with these weights.

    That is a[M, K] · b[K, N] as a layer's output or as the gradient of its input or of its weight.
    The gradients may be transposed: torch computes them so if the other factor is column-major.
    """
    if len(a) != 2:
        return False
    (m, k), n = a, b[1]
    return not weights.isdisjoint(((n, k), (k, n), (k, m), (m, n), (n, m)))
