"""Element types for parametrized tests."""

from __future__ import annotations

from gemmsmith.core.operation import DType

FLOATS = (DType.BF16, DType.FP16, DType.FP8_E4M3, DType.FP8_E5M2)
"""The types for which every CUTLASS backend has kernels."""
