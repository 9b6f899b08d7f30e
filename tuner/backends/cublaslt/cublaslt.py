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

    Nothing is enumerated: only the library can name its algorithms, on the GPU they are for, so a
    tuning run asks the device (`Device.proposals`).
    """

    name = Backend.CUBLASLT

    def supports(self, operation: Operation, arch: Architecture) -> bool:  # noqa: ARG002
        """Never: there is nothing to enumerate."""
        return False

    def kernels(
        self,
        problem: Problem,  # noqa: ARG002
        arch: Architecture,  # noqa: ARG002
        level: Level,  # noqa: ARG002
    ) -> Sequence[AnyKernel]:
        """None that could be named without a GPU."""
        return ()

    def fitted(self, problem: Problem, device: DeviceModel) -> Sequence[AnyKernel]:  # noqa: ARG002
        """None."""
        return ()

    def prepare(self, problem: Problem, device: DeviceModel) -> None:
        """Nothing to do."""

    def launches(
        self,
        kernel: AnyKernel,  # noqa: ARG002
        problem: Problem,  # noqa: ARG002
        device: DeviceModel,  # noqa: ARG002
    ) -> list[Launch]:
        """None that could be named without a GPU."""
        return []

    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        """Why the kernel cannot take the problem; the library judges the algorithm."""
        if kernel != kernel_of(kernel.operation, kernel.arch):
            return "it is not what the pack has for its operation"
        return None if problem is None else legality.problem_refusal(kernel, problem)

    def part(self, kernel: AnyKernel) -> Part:
        """What the kernel is compiled from."""
        return part(kernel.name)

    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:  # noqa: ARG002
        """All of them compile alike."""
        return ()

    def features(self, kernel: AnyKernel) -> Features[float]:  # noqa: ARG002
        """Nothing is known of what the library would run."""
        return UNKNOWN


CUBLASLT: Final = CublasLt()
