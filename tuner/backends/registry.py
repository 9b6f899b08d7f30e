"""All backends. To add a backend, write a folder and a line in `_ALL`."""

from __future__ import annotations

from gemmsmith.core.kernel import Backend, Kernel
from tuner.backends.backend import KernelBackend
from tuner.backends.cublaslt.cublaslt import CUBLASLT
from tuner.backends.cute.cute import CUTE
from tuner.backends.cutlass2x.cutlass2x import CUTLASS2X
from tuner.backends.cutlass3x.cutlass3x import CUTLASS3X

_ALL: tuple[KernelBackend, ...] = (CUTLASS3X, CUTLASS2X, CUTE, CUBLASLT)

BACKENDS: dict[Backend, KernelBackend] = {backend.name: backend for backend in _ALL}
"""In the order in which their kernels are listed."""


def backend_of(kernel: Kernel) -> KernelBackend | None:
    return BACKENDS.get(kernel.backend)
