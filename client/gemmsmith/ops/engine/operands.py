"""The operands of a product beside A and B, in one record: a tensor for each name.

`OPERANDS` describes the operands of epilogues. A new operand is one entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from gemmsmith.core.elements import Element
from gemmsmith.core.operation import Operation
from gemmsmith.ops.engine.forms import Shape

Operands = Mapping[str, torch.Tensor]
"""Tensors by name: those of `OPERANDS`, and

- `c`, which is added to the product, and `d`, which the result is written to; both of D's size;
- `scale_a` and `scale_b`: contiguous FP32 factors, one element each, or one for each row of A and
  each column of B;
- `offsets`: contiguous int32 on the device, the end of each group of a grouped product;
- `up`: the second weight of a gated product, laid out as B, which is the gate's;
- `scale_d`: one FP32 factor of an FP8 D, 1 if absent;
- `amax`: one FP32 element, which becomes the larger one of itself and of an FP8 D's largest
  absolute value before `scale_d`.
"""

NO_OPERANDS: Operands = MappingProxyType({})


def present(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class EpilogueOperand(NamedTuple):
    """An operand of epilogues. Its pointer in the C ABI has the operand's name.

    Attributes:
        size: of the packed tensor, by the product's shape.
        element: its element type; by default D's.
        leading: the name of its leading dimension in the C ABI. None for a vector.
    """

    size: Callable[[Shape], tuple[int, ...]]
    element: Callable[[Operation], Element] = lambda operation: operation.d
    leading: str | None = None


def _columns(shape: Shape) -> tuple[int, ...]:
    return (shape.problem.n,)


def _rows(shape: Shape) -> tuple[int, ...]:
    return shape.output[:-1]


def _matrix(shape: Shape) -> tuple[int, ...]:
    return (*shape.output[:-1], shape.problem.n)


def _aux(shape: Shape) -> tuple[int, ...]:
    # N columns forwards, of a gate and its up together too. Backwards N is the columns of one.
    backward = shape.problem.operation.epilogue.backward
    return (*shape.output[:-1], shape.problem.n * (backward.halves if backward else 1))


OPERANDS = {
    "bias": EpilogueOperand(_columns, element=lambda it: it.bias),
    "residual": EpilogueOperand(_matrix, leading="ld_residual"),
    "column_scale": EpilogueOperand(_columns, element=lambda it: it.bias),
    "row_scale": EpilogueOperand(_rows, element=lambda _: Element.F32),
    "aux": EpilogueOperand(_aux, leading="ld_aux"),
    "activated": EpilogueOperand(_matrix, leading="ld_activated"),
    "bias_gradient": EpilogueOperand(_columns),
}
"""By name; see `Epilogue.operands` and `Epilogue.results`."""
