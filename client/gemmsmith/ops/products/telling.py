"""Whoever records what could be fused is told of it here, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gemmsmith.epilogue import Epilogue
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import operators

Listener = Callable[[torch.Tensor, torch.Tensor, Epilogue, int], None]
"""Is told of x, weight, what could follow their product in one kernel, and the number of groups; of
backward epilogues dY stands for x, without its data."""


class Multiplied(NamedTuple):
    """What an operator multiplies that shows no product of its own, or could.

    Attributes:
        output: element type of the result; None: as torch gives it.
        epilogue: what follows it.
        groups: how many, of a grouped product.
    """

    form: Form
    a: torch.Tensor
    b: torch.Tensor
    output: torch.dtype | None = None
    epilogue: Epilogue = Epilogue.NONE
    groups: int = 0


_listeners: list[Listener] = []


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Tell of every call of `linear` that a fused kernel could answer, until the block's end."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_told() -> bool:
    """Whether somebody listens."""
    return bool(_listeners)


def tell(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, groups: int = 0) -> None:
    """Tell every listener, in the types that autocast gives; of a gate, its own rows. `groups`: of
    a grouped product.
    """
    x, weight = operators.autocast(x, weight)
    for listener in _listeners:
        listener(x, weight, epilogue, groups)
