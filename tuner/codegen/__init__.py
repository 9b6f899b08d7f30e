"""Kernels → C++ translation units with our C ABI, whatever backend they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmsmith.kernel import AnyKernel, CublasLtKernel, cutlass
from tuner.codegen import unit
from tuner.codegen.slim import write_slim_headers
from tuner.codegen.unit import HEADERS, headers_digest, unit_source

__all__ = [
    "HEADERS",
    "Unit",
    "headers_digest",
    "kernel_digest",
    "unit_of",
    "unit_source",
    "write_slim_headers",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What the compiler is given: a translation unit and the folders it includes from."""

    source: str
    include: tuple[Path, ...] = ()


def unit_of(kernels: Sequence[AnyKernel]) -> Unit:
    """The translation unit of a pack with these kernels, which are all of one family."""
    if isinstance(kernels[0], CublasLtKernel):
        from tuner.backends.cublaslt import build

        return Unit(source=build.unit_source(build.described_by(kernels)), include=(build.INCLUDE,))
    return Unit(source=unit_source([cutlass(kernel) for kernel in kernels]))


def kernel_digest(kernel: AnyKernel) -> str:
    """Hash of everything of ours that the kernel compiles from: its own text and our headers."""
    if isinstance(kernel, CublasLtKernel):
        from tuner.backends.cublaslt import build

        return build.digest(build.described_by([kernel]))
    return unit.kernel_digest(kernel)
