"""The backend `cublaslt`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gemmsmith.core import legality
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, Backend
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture
from tuner.backends.backend import UNKNOWN, Features, Level, Part
from tuner.backends.cublaslt.algorithms import kernel_of
from tuner.backends.cublaslt.build import part


class CublasLt:
    """cuBLASLt's own algorithms.

    Nothing is enumerated: a tuning run gets the algorithms from the device (`Device.proposals`),
    because only the library can list them, and only on the GPU that they are for.
    """

    name = Backend.CUBLASLT

    def supports(self, operation: Operation, arch: Architecture) -> bool:  # noqa: ARG002
        return False

    def kernels(
        self,
        problem: Problem,  # noqa: ARG002
        arch: Architecture,  # noqa: ARG002
        level: Level,  # noqa: ARG002
    ) -> Sequence[AnyKernel]:
        return ()

    def fitted(self, problem: Problem, device: DeviceModel) -> Sequence[AnyKernel]:  # noqa: ARG002
        return ()

    def prepare(self, problem: Problem, device: DeviceModel) -> None:
        """Do nothing: no kernel is enumerated."""

    def launches(
        self,
        kernel: AnyKernel,  # noqa: ARG002
        problem: Problem,  # noqa: ARG002
        device: DeviceModel,  # noqa: ARG002
    ) -> list[Launch]:
        return []

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
