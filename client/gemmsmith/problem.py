"""What is computed: a matrix product, its element types and its operand layouts.

A `Problem` says nothing about how it is computed; that is a `Kernel` and a `Launch`.
Everything here is plain data: no torch, no CUDA, no input or output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.errors import InvalidProblem

MAX_EXTENT = 2**31 - 1
"""CUTLASS kernels take M, N, K and the batch count as 32-bit signed integers."""


class Element(StrEnum):
    """The type of one matrix element."""

    BF16 = "bf16"  # bfloat16: 8-bit exponent, 7-bit mantissa
    F16 = "f16"  # IEEE half precision
    E4M3 = "e4m3"  # FP8 for weights and activations
    E5M2 = "e5m2"  # FP8 for gradients
    F32 = "f32"  # accumulators, split-K partials

    @property
    def bits(self) -> int:
        """Storage size of one element."""
        return _BITS[self]

    @property
    def bytes(self) -> int:
        """Storage size of one element in bytes."""
        return self.bits // 8


_BITS = {Element.BF16: 16, Element.F16: 16, Element.E4M3: 8, Element.E5M2: 8, Element.F32: 32}


class DType(StrEnum):
    """The short name of a problem's element types; accumulation is in FP32 throughout."""

    BF16 = "bf16"  # bf16 × bf16 → bf16
    FP16 = "fp16"  # f16 × f16 → f16
    FP8_E4M3 = "fp8_e4m3"  # e4m3 × e4m3 → bf16, per-tensor scales
    FP8_E5M2 = "fp8_e5m2"  # e5m2 × e4m3 → bf16, per-tensor scales (gradients)

    @property
    def a(self) -> Element:
        """Element type of operand A."""
        return _ELEMENTS[self][0]

    @property
    def b(self) -> Element:
        """Element type of operand B."""
        return _ELEMENTS[self][1]

    @property
    def d(self) -> Element:
        """Element type of the output D (and of C)."""
        return _ELEMENTS[self][2]

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are 8-bit floating point, with per-tensor scales."""
        return self.a.bits == 8


_ELEMENTS = {
    DType.BF16: (Element.BF16, Element.BF16, Element.BF16),
    DType.FP16: (Element.F16, Element.F16, Element.F16),
    DType.FP8_E4M3: (Element.E4M3, Element.E4M3, Element.BF16),
    DType.FP8_E5M2: (Element.E5M2, Element.E4M3, Element.BF16),
}


class Layout(StrEnum):
    """CUTLASS's letters for A and B: `t` row-major, `n` column-major. D is row-major."""

    TN = "tn"  # A[M,K] row, B[K,N] column: torch.nn.functional.linear's forward
    TT = "tt"  # A row, B row: the input gradient of a linear layer
    NT = "nt"  # A column, B row: the weight gradient of a linear layer
    NN = "nn"  # A column, B column

    @property
    def a_row_major(self) -> bool:
        """Whether A[M,K] is contiguous along K."""
        return self.value[0] == "t"

    @property
    def b_row_major(self) -> bool:
        """Whether B[K,N] is contiguous along N."""
        return self.value[1] == "t"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Problem:
    """`D[M,N] = alpha · A[M,K] · B[K,N] + beta · C[M,N]`, `batch` times over.

    Raises:
        InvalidProblem: an extent is not an integer in 1 … 2³¹-1, or the layout is not one that
            the element types support (FP8 on Hopper is `tn` only).
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: DType = DType.BF16
    layout: Layout = Layout.TN

    def __post_init__(self) -> None:
        for field in ("m", "n", "k", "batch"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidProblem(field, f"{field} must be an integer, got {value!r}")
            if not 1 <= value <= MAX_EXTENT:
                raise InvalidProblem(field, f"{field} must be in 1 … {MAX_EXTENT}, got {value}")
        if self.dtype.is_fp8 and self.layout is not Layout.TN:
            raise InvalidProblem(
                "layout",
                f"{self.dtype} needs layout tn (both operands contiguous along K), "
                f"got {self.layout}: tensor cores of this generation read FP8 K-major only",
            )

    @property
    def flops(self) -> int:
        """Floating-point operations: a multiply and an add per term."""
        return 2 * self.m * self.n * self.k * self.batch

    @property
    def operand_bytes(self) -> int:
        """Fewest bytes moved through device memory: A and B read once, D written once."""
        per_batch = (
            self.m * self.k * self.dtype.a.bytes
            + self.k * self.n * self.dtype.b.bytes
            + self.m * self.n * self.dtype.d.bytes
        )
        return per_batch * self.batch

    @property
    def contiguous_a(self) -> int:
        """Extent of A along its contiguous dimension, in elements."""
        return self.k if self.layout.a_row_major else self.m

    @property
    def contiguous_b(self) -> int:
        """Extent of B along its contiguous dimension, in elements."""
        return self.n if self.layout.b_row_major else self.k

    @property
    def log_extents(self) -> tuple[float, float, float]:
        """log2 of M, N and K."""
        return math.log2(self.m), math.log2(self.n), math.log2(self.k)

    def distance(self, other: Problem) -> float:
        """Euclidean distance in log2 of M, N and K: 1 is a factor of two in one of them."""
        return math.dist(self.log_extents, other.log_extents)

    def __str__(self) -> str:
        batch = f"{self.batch}×" if self.batch > 1 else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {self.dtype} {self.layout}"
