"""The backend `cublaslt`."""

from __future__ import annotations

from typing import Final

from gemmsmith.core import legality
from gemmsmith.core.kernel import AnyKernel, Backend
from gemmsmith.core.problem import Problem
from tuner.backends.backend import UNKNOWN, Features, KernelBackend, Part
from tuner.backends.cublaslt.algorithms import kernel_of
from tuner.backends.cublaslt.build import part


class CublasLt(KernelBackend):
    """cuBLASLt's own algorithms.

    Nothing is enumerated: a tuning run gets the algorithms from the device (`Device.proposals`),
    because only the library can list them, and only on the GPU that they are for.
    """

    name = Backend.CUBLASLT

    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        # Whether an algorithm suits the problem is for the library to decide, at the launch.
        if kernel != kernel_of(kernel.operation, kernel.arch):
            return "the pack has another kernel for this operation"
        return None if problem is None else legality.problem_refusal(kernel, problem)

    def part(self, kernel: AnyKernel) -> Part:
        return part(kernel.name)

    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:  # noqa: ARG002
        return ()

    def features(self, kernel: AnyKernel) -> Features[float]:  # noqa: ARG002
        # The library does not say what an algorithm runs.
        return UNKNOWN


CUBLASLT: Final = CublasLt()
