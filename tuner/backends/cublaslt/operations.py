"""The operations that the library computes; each is one kernel of the pack.

Not every GPU's library has algorithms for all of them. It then proposes nothing, as for FP8 on
Hopper in other layouts than `tn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gemmsmith.core.operation import Element, Layout, Operation, Scaling


class Compute(StrEnum):
    """How products are computed and summed."""

    F32 = "f32"  # exact products, summed in FP32
    TF32 = "tf32"  # FP32 operands rounded to TF32, summed in FP32
    S32 = "s32"  # integers


_STORED: Final = {Element.TF32: "f32"}
_COMPUTED: Final = {Element.TF32: Compute.TF32, Element.S8: Compute.S32}


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryOperation:
    """One kernel of the pack: everything except sizes and strides. All kernels can add `beta · C`.

    Attributes:
        a, b, d: short names of element types; C has the type of D.
        fast_accumulation: whether FP8 sums stay in the tensor core.
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
        """The library's fastest kernel of an operation; None if the library cannot compute it."""
        if operation.is_grouped or operation.is_fused or operation.symmetric:
            return None
        library = cls(
            a=_STORED.get(operation.a, operation.a.value),
            b=_STORED.get(operation.b, operation.b.value),
            d=operation.d.value,
            layout=operation.layout,
            compute=_COMPUTED.get(operation.a, Compute.F32),
            scales=operation.scaling,
            fast_accumulation=operation.is_narrow_float,
        )
        return library if library in OPERATIONS else None

    @property
    def name(self) -> str:
        """The kernel's unique name, such as `cublaslt_e4m3_e4m3_f32_bf16_tn_tensor_fast`."""
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
"""All kernels of the pack, in the order of its table."""
