"""What the library computes, one kernel of the pack each.

Which of them a GPU's library really has, only the library knows: where it has none, it proposes
nothing (FP8 on Hopper in other layouts than `tn`, for one).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gemmsmith.core.operation import Element, Epilogue, Grouping, Layout, Operation, Scaling


class Compute(StrEnum):
    """How products are computed and summed."""

    F32 = "f32"  # in full, summed in FP32
    TF32 = "tf32"  # FP32 operands rounded to TF32, summed in FP32
    S32 = "s32"  # integers


_STORED: Final = {Element.TF32: "f32"}
_COMPUTED: Final = {Element.TF32: Compute.TF32, Element.S8: Compute.S32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryOperation:
    """One kernel of the pack: everything but sizes and strides. Any of them takes `beta · C`.

    Attributes:
        a, b, d: element types by their short names; C has D's.
        fast_accumulation: FP8 sums stay in the tensor core.
    """

    a: str
    b: str
    d: str
    layout: Layout
    compute: Compute = Compute.F32
    scales: Scaling = Scaling.NONE
    fast_accumulation: bool = False

    @classmethod
    def of(cls, operation: Operation) -> LibraryOperation | None:
        """What the library computes for an operation, as fast as it can; None: it cannot."""
        if operation.grouping is not Grouping.NONE or operation.epilogue is not Epilogue.NONE:
            return None
        found = cls(
            a=_STORED.get(operation.a, operation.a.value),
            b=_STORED.get(operation.b, operation.b.value),
            d=operation.d.value,
            layout=operation.layout,
            compute=_COMPUTED.get(operation.a, Compute.F32),
            scales=operation.scaling,
            fast_accumulation=operation.is_narrow_float,
        )
        return found if found in OPERATIONS else None

    @property
    def name(self) -> str:
        """Unique: `cublaslt_e4m3_e4m3_f32_bf16_tn_tensor_fast`."""
        parts = ["cublaslt", self.a, self.b, self.compute.value, self.d, self.layout.value]
        if self.scales is not Scaling.NONE:
            parts.append(self.scales.value)
        if self.fast_accumulation:
            parts.append("fast")
        return "_".join(parts)


_PLAIN: Final = (
    ("bf16", "bf16", "bf16", Compute.F32),
    ("f16", "f16", "f16", Compute.F32),
    ("bf16", "bf16", "f32", Compute.F32),
    ("f16", "f16", "f32", Compute.F32),
    ("f32", "f32", "f32", Compute.TF32),
    ("s8", "s8", "s32", Compute.S32),
)
_FP8: Final = (("e4m3", "e4m3", "bf16"), ("e5m2", "e4m3", "bf16"))

OPERATIONS: Final = (
    *(
        LibraryOperation(a=a, b=b, d=d, layout=layout, compute=compute)
        for a, b, d, compute in _PLAIN
        for layout in (Layout if compute is not Compute.S32 else (Layout.TN,))
    ),
    *(
        LibraryOperation(a=a, b=b, d=d, layout=Layout.TN, scales=scales, fast_accumulation=fast)
        for a, b, d in _FP8
        for scales in (Scaling.TENSOR, Scaling.ROW)
        for fast in (True, False)
    ),
)
"""The kernels of the pack, in its order."""
