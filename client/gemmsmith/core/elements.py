"""Element types of matrices, their layout in memory, and the names of both.

Our names are CUTLASS's. `spelt` also accepts the names of torch and numpy, as text or as their
type objects, and other common names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

TypeName: TypeAlias = "str | torch.dtype"
"""An element type by name, or as a `torch.dtype`. This module does not import torch."""


class Element(StrEnum):
    """The type of one matrix element."""

    BF16 = "bf16"  # bfloat16: 8-bit exponent, 7-bit mantissa
    F16 = "f16"  # IEEE half precision
    E4M3 = "e4m3"  # FP8 for weights and activations
    E5M2 = "e5m2"  # FP8 for gradients
    S8 = "s8"  # signed 8-bit integers
    TF32 = "tf32"  # FP32 in memory, of which tensor cores read 10 bits of mantissa
    F32 = "f32"  # outputs, accumulators, split-K partials
    S32 = "s32"  # outputs and accumulators of integer products

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def is_integer(self) -> bool:
        # Sums of integers are exact, in any order.
        return self in (Element.S8, Element.S32)


_BITS = {
    Element.BF16: 16,
    Element.F16: 16,
    Element.E4M3: 8,
    Element.E5M2: 8,
    Element.S8: 8,
    Element.TF32: 32,
    Element.F32: 32,
    Element.S32: 32,
}


ELEMENTS = {
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "float32": "f32",
    "fp32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "s8",
    "int32": "s32",
}
"""Other names of `Element`s."""


def spelt(name: object, others: dict[str, str]) -> str:
    """Our spelling of a type's name: the entry of `others` if it has the name, else the name.

    `name` is a text in any case, of which only the part before the first dot is translated, or a
    type object of torch or numpy, of which `str` is used: `torch.bfloat16`.
    """
    text = str(name).lower().removeprefix("torch.")
    first, dot, rest = text.partition(".")
    return f"{others.get(first, first)}{dot}{rest}"


class Layout(StrEnum):
    """CUTLASS's letters for A and B: `t` row-major, `n` column-major. D is row-major."""

    TN = "tn"  # A[M,K] row, B[K,N] column: torch.nn.functional.linear's forward
    TT = "tt"  # A row, B row: the input gradient of a linear layer
    NT = "nt"  # A column, B row: the weight gradient of a linear layer
    NN = "nn"  # A column, B column

    @property
    def a_row_major(self) -> bool:
        return self.value[0] == "t"

    @property
    def b_row_major(self) -> bool:
        return self.value[1] == "t"

    @property
    def is_k_major(self) -> bool:
        # Both operands are contiguous along K.
        return self is Layout.TN
