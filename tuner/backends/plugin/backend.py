"""The interface of a plugin: a backend that another installed package adds.

The package names an object of a subclass of `PluginBackend` in its entry points:

    [project.entry-points."gemmsmith.backends"]
    my_kernels = "my_package:BACKEND"

From there on its kernels are enumerated, compiled, verified, timed and served like all others. What
a plugin computes wrongly or slowly does not pass: its kernels are verified and timed against the
default, too.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

from gemmsmith.core import legality
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, PluginKernel
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.showing import line
from tuner.arch import Architecture, architecture
from tuner.backends.backend import Features, KernelBackend, Level
from tuner.backends.cutlass.features import (
    EPILOGUE_US,
    LAUNCH_US,
    PROLOGUE_US,
    STORE_BYTES_PER_CLOCK,
)

_LOG = logging.getLogger(__name__)


class PluginBackend(KernelBackend):
    """A plugin. `name` is that of its entry point, and the `plugin` of its kernels.

    A subclass defines `listed`, `part` and, if another compiler makes its kernels, `files`.
    `tuner.backends.plugin.cubin` writes both for a compiler that makes cubins.
    """

    @abstractmethod
    def listed(self, operation: Operation, arch: Architecture) -> Sequence[PluginKernel]:
        """All kernels for an operation, in a fixed order; empty if it is not supported."""

    def files(self, kernel: PluginKernel) -> Mapping[str, str]:  # noqa: ARG002
        """Files that the kernel's part includes, by name, made where its pack is compiled.

        Called in a process of its own, so it may take seconds, and import what it likes. Anything
        that it raises is recorded as the reason why the kernel does not compile. What decides the
        content must be in `part` too, because packs are found by the text of that.
        """
        return {}

    def supports(self, operation: Operation, arch: Architecture) -> bool:
        """Whether it lists kernels. A list with a fault is logged, and none of it is used."""
        try:
            kernels = self.listed(operation, arch)
            self._check(kernels)
        except Exception as error:  # noqa: BLE001 - another package's fault must not end a run
            reason = line(f"{type(error).__name__}: {error}")
            where = f"{operation} on {arch.name}"
            _LOG.warning("the plugin %s is left out for %s: %s", self.name, where, reason)
            return False
        return bool(kernels)

    def _check(self, kernels: Sequence[PluginKernel]) -> None:
        """Raise whatever is wrong with a list of its kernels."""
        names = {kernel.name for kernel in kernels if kernel.plugin == self.name}
        if len(names) < len(kernels):
            raise ValueError(f"it lists a name twice, or a kernel that is not of {self.name}")
        for kernel in kernels:
            self.part(kernel)

    def kernels(self, problem: Problem, arch: Architecture, level: Level) -> Sequence[AnyKernel]:  # noqa: ARG002
        return [
            kernel
            for kernel in self.listed(problem.operation, arch)
            if legality.problem_refusal(kernel, problem) is None
        ]

    def launches(
        self,
        kernel: AnyKernel,  # noqa: ARG002
        problem: Problem,  # noqa: ARG002
        device: DeviceModel,  # noqa: ARG002
    ) -> list[Launch]:
        return [Launch()]

    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        if kernel not in self.listed(kernel.operation, architecture(kernel.arch)):
            return f"the plugin {self.name} has no such kernel"
        return None if problem is None else legality.problem_refusal(kernel, problem)

    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:
        return (kernel.name,)

    def features(self, kernel: AnyKernel) -> Features[float]:
        """A kernel that computes one tile per thread block, at the full rate of the tensor core."""
        m, n, k = cast("PluginKernel", kernel).tile
        operation = kernel.operation
        return Features(
            tile_m=m,
            tile_n=n,
            tile_k=k,
            cluster_m=1,
            cluster_n=1,
            swapped=0,
            sliced=0,
            cluster_split=0,
            padded=0,
            overlapped=0,
            fixed_us=LAUNCH_US + PROLOGUE_US + EPILOGUE_US,
            compute_clocks=2
            * m
            * n
            * k
            / architecture(kernel.arch).peak_flops_per_clock(operation.a.bits),
            ingest_bytes=(m + n) * k * operation.a.bytes,
            store_clocks=m * n * operation.d.bytes / STORE_BYTES_PER_CLOCK,
        )
