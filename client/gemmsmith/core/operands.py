"""Short names of operand types, their meaning, and other names for them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gemmsmith.core.elements import Element


class Scaling(StrEnum):
    """FP32 factors on the device that multiply the product, in addition to alpha."""

    NONE = "none"  # no factors
    TENSOR = "tensor"  # one factor for A and one for B
    ROW = "row"  # one for each row of A and each column of B
    BLOCK = "block"  # one for each 1×128 of A and each 128×128 of B


class Grouping(StrEnum):
    """How a call computes many products over tokens that are sorted by group (expert)."""

    NONE = "none"  # a single product, or a batch of products of the same size
    ROWS = "rows"  # each group's rows of A times that group's B: forward, input gradient
    DEPTH = "depth"  # K is divided into groups, each with its own D: weight gradient


class DType(StrEnum):
    """Short names of operand types. Each implies a default output type and scaling."""

    BF16 = "bf16"  # bf16 × bf16 → bf16
    FP16 = "fp16"  # f16 × f16 → f16
    FP8_E4M3 = "fp8_e4m3"  # e4m3 × e4m3 → bf16, per-tensor scales
    FP8_E5M2 = "fp8_e5m2"  # e5m2 × e4m3 → bf16, per-tensor scales (gradients)
    INT8 = "int8"  # s8 × s8 → s32
    TF32 = "tf32"  # FP32 operands read as TF32 → f32


class Meaning(NamedTuple):
    """What a short name stands for."""

    a: Element
    b: Element
    d: Element
    accumulator: Element = Element.F32
    outputs: tuple[Element, ...] = ()  # further types that D may have
    scaling: Scaling = Scaling.NONE
    scalings: tuple[Scaling, ...] = ()  # further scalings that exist


_BF16, _E4M3, _S8 = Element.BF16, Element.E4M3, Element.S8
_FP8 = Meaning(_E4M3, _E4M3, _BF16, scaling=Scaling.TENSOR, scalings=(Scaling.ROW, Scaling.BLOCK))
MEANINGS = {
    DType.BF16: Meaning(_BF16, _BF16, _BF16, outputs=(Element.F32,)),
    DType.FP16: Meaning(Element.F16, Element.F16, Element.F16, outputs=(Element.F32,)),
    DType.FP8_E4M3: _FP8._replace(outputs=(_E4M3,)),
    DType.FP8_E5M2: _FP8._replace(a=Element.E5M2),
    DType.INT8: Meaning(
        _S8, _S8, Element.S32, Element.S32, outputs=(_BF16,), scalings=(Scaling.ROW,)
    ),
    DType.TF32: Meaning(Element.TF32, Element.TF32, Element.F32),
}
"""The meaning of each short name."""

OPERANDS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
"""Other names of operand types (`DType`). `float32` is not one: TF32 reads fewer bits."""
