"""For which products torch's operators are replaced at present."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Weights = frozenset[tuple[int, int]]
"""Sizes of linear layers' weights: (out_features, in_features)."""


class Shaped(Protocol):
    """A tensor, or what matters of it."""

    @property
    def shape(self) -> Sequence[int]:
        """Its size."""


class Blocks:
    """The blocks that are open, each for the products with some weights, or for all.

    Attributes:
        only: weights of all of them; None: every product is replaced. No block has no weights.
    """

    def __init__(self) -> None:
        self._open: list[Weights | None] = []
        self.only: Weights | None = frozenset()

    @contextmanager
    def opened(self, only: Weights | None) -> Iterator[None]:
        """One block more. Blocks may overlap: each adds to what the others replace."""
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

    def hold(self, a: Shaped, b: Shaped) -> bool:
        """Whether a product of these is replaced."""
        return self.only is None or of_layers(self.only, a.shape, b.shape)


def of_layers(weights: Weights, a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether a product of these sizes may be one of linear layers with these weights.

    That is a[M, K] · b[K, N] as a layer's output or as the gradient of its input or of its weight,
    the gradients also transposed, as torch computes them where the other factor lies in columns.
    """
    if len(a) != 2:
        return False
    (m, k), n = a, b[1]
    return not weights.isdisjoint(((n, k), (k, n), (k, m), (m, n), (n, m)))
