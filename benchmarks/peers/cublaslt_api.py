"""The part of cuBLASLt's C API that timing its heuristics needs, through ctypes.

The library is the one that torch has loaded, so torch.mm runs the same cuBLAS. nvmath-python 1.0
binds the same calls, but its wheels (5.3 MB, and NumPy's 15.7) would have to be carried to GPU
hosts, and its Matmul allocates its output. Constants are those of cublasLt.h 13.1. The descriptor
calls need no GPU and are tested against the library where it is installed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from gemmsmith.core.problem import Element

NOT_SUPPORTED = 15
_COMPUTE_32F = 68
_R_32F = 0
_DATA_TYPES = {Element.F16: 2, Element.BF16: 14, Element.E4M3: 28, Element.E5M2: 29}

_TRANSA, _TRANSB, _A_SCALE, _B_SCALE, _FAST_ACCUM = 3, 4, 17, 18, 25  # CUBLASLT_MATMUL_DESC_…
_BATCH_COUNT, _BATCH_OFFSET = 5, 6  # CUBLASLT_MATRIX_LAYOUT_…
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_…


class LtError(RuntimeError):
    """A cuBLASLt call failed; `status` is cublasStatus_t."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: cuBLAS status {status}")
        self.status = status


class Algorithm(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`; its first member is the algorithm itself."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_CALLS: dict[str, list[Any]] = {
    "Create": [POINTER(c_void_p)],
    "MatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "MatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "MatrixLayoutSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulPreferenceCreate": [POINTER(c_void_p)],
    "MatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "MatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, POINTER(Algorithm), POINTER(c_int)],
    "Matmul": [c_void_p] * 14 + [c_size_t, c_void_p],
}


class Library:
    """An opened libcublasLt; every call is checked."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, f"cublasLt{name}") for name in _CALLS}
        for name, function in self._functions.items():
            function.restype, function.argtypes = c_int, _CALLS[name]

    def call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            raise LtError(f"cublasLt{name}", status)

    def create(self, name: str, *arguments: Any) -> c_void_p:
        """Create a descriptor or handle. It is never freed: a process makes a few hundred."""
        pointer = c_void_p()
        self.call(name, byref(pointer), *arguments)
        return pointer

    def layout(
        self, element: Element, rows: int, columns: int, leading: int, batch: int, stride: int
    ) -> c_void_p:
        """Describe `batch` column-major matrices that are `stride` elements apart."""
        layout = self.create("MatrixLayoutCreate", _DATA_TYPES[element], rows, columns, leading)
        if batch > 1:
            for attribute, value in (
                (_BATCH_COUNT, c_int32(batch)),
                (_BATCH_OFFSET, c_int64(stride)),
            ):
                self.set("MatrixLayout", layout, attribute, value)
        return layout

    def product(self, *, transposed: tuple[bool, bool], scales: tuple[int, int] | None) -> c_void_p:
        """Describe alpha · op(A) · op(B) in FP32.

        `scales` are device addresses of FP8's per-tensor scales.
        """
        product = self.create("MatmulDescCreate", _COMPUTE_32F, _R_32F)
        for attribute, flag in zip((_TRANSA, _TRANSB), transposed, strict=True):
            self.set("MatmulDesc", product, attribute, c_int32(flag))
        if scales is not None:
            for attribute, pointer in zip((_A_SCALE, _B_SCALE), scales, strict=True):
                self.set("MatmulDesc", product, attribute, c_void_p(pointer))
            self.set("MatmulDesc", product, _FAST_ACCUM, ctypes.c_int8(1))
        return product

    def preference(self, workspace_bytes: int) -> c_void_p:
        preference = self.create("MatmulPreferenceCreate")
        self.set("MatmulPreference", preference, _MAX_WORKSPACE, c_size_t(workspace_bytes))
        return preference

    def set(self, kind: str, descriptor: c_void_p, attribute: int, value: Any) -> None:
        """Set an attribute from a ctypes value of exactly its size."""
        self.call(f"{kind}SetAttribute", descriptor, attribute, byref(value), ctypes.sizeof(value))

    def algorithms(
        self,
        handle: c_void_p,
        product: c_void_p,
        layouts: tuple[c_void_p, ...],
        preference: c_void_p,
        most: int,
    ) -> list[Algorithm]:
        """Return the heuristics' proposals for layouts (A, B, D), best first; C is D.

        The list is empty if cuBLASLt does not support the product.
        """
        proposals, count = (Algorithm * most)(), c_int()
        a, b, d = layouts
        try:
            self.call(
                "MatmulAlgoGetHeuristic",
                *(handle, product, a, b, d, d, preference, most, proposals, byref(count)),
            )
        except LtError as error:
            if error.status == NOT_SUPPORTED:
                return []
            raise
        return [proposal for proposal in proposals[: count.value] if proposal.state == 0]
