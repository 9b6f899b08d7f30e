"""What could follow a product within a kernel, for the records of `gemmsmith.program.calls`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products.registry import autocast
from gemmsmith.program.calls import recording


class Multiplied(NamedTuple):
    """What an operator multiplies.

    Attributes:
        form: which product. None if no kernel computes it.
        output: element type of the result; by default torch's for such a product.
        epilogue: what follows the product.
        groups: how many, of a grouped product.
    """

    form: Form | None
    a: torch.Tensor
    b: torch.Tensor
    output: torch.dtype | None = None
    epilogue: Epilogue = Epilogue.NONE
    groups: int = 0


def is_recording() -> bool:
    """Whether something records. A compiled graph is made as if nothing did."""
    return not torch.compiler.is_compiling() and bool(recording())


def record(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, groups: int = 0) -> None:
    """Note what could follow the product of a layer, in the types that autocast gives.

    Args:
        x: of the layer; for backward epilogues dY, without its data.
        weight: of the layer; of a gate, its own rows.
        epilogue: what could follow.
        groups: how many, of a grouped product.
    """
    x, weight = autocast(x, weight)
    for calls in recording():
        calls.record(x, weight, epilogue.value, groups)
