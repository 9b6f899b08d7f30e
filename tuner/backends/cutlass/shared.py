"""The shared base of the backends that use CUTLASS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from gemmsmith.core import legality
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel, Backend, CutlassKernel, cutlass
from gemmsmith.core.launch import Launch
from gemmsmith.core.operation import Element, Epilogue, Grouping, Operation, Scaling
from gemmsmith.core.problem import Problem
from tuner.arch import SM90, Architecture
from tuner.backends.backend import Features, KernelBackend, Level, Part
from tuner.backends.cutlass import generated
from tuner.backends.cutlass.alignment import alike, of_kernels
from tuner.backends.cutlass.features import features
from tuner.backends.cutlass.launches import launches
from tuner.backends.cutlass.rules import (
    KernelRule,
    choice_refusal,
    fields_follow_name,
    operation_exists,
)

FLOATS = frozenset({Element.BF16, Element.F16, Element.E4M3, Element.E5M2})


@dataclass(frozen=True, kw_only=True, eq=False)
class CutlassBackend(KernelBackend):
    """A backend whose kernels are `CutlassKernel`s.

    Attributes:
        rules: the legality rules of its kernels, by name.
        legal: the kernels that take a problem on an architecture; cached.
        write: a kernel's share of a translation unit.
        architectures: names of the architectures that it has kernels for.
        operands: element types of A and B.
        scalings: further scalings by type of A and grouping. By default FP8 has one factor per
            operand, and other types have none.
        epilogues, grouped_epilogues: epilogues of products without and with groups.
        symmetric: whether it has kernels of symmetric products.
    """

    name: Backend
    rules: Mapping[str, KernelRule]
    legal: Callable[[Problem, Architecture, Level], tuple[CutlassKernel, ...]]
    write: Callable[[CutlassKernel], Part]
    architectures: frozenset[str]
    operands: frozenset[Element]
    scalings: frozenset[tuple[Element, Scaling, Grouping]] = frozenset()
    groupings: frozenset[Grouping] = frozenset({Grouping.NONE})
    epilogues: frozenset[Epilogue] = frozenset({Epilogue.NONE})
    grouped_epilogues: frozenset[Epilogue] = frozenset({Epilogue.NONE})
    symmetric: bool = False

    def supports(self, operation: Operation, arch: Architecture) -> bool:
        """Whether the backend has kernels of the operation on the architecture.

        On architectures other than sm90, only the operations that CUTLASS generates kernels for.
        """
        plain_fp8 = operation.is_narrow_float and not operation.is_grouped
        default = Scaling.TENSOR if plain_fp8 else Scaling.NONE
        scaling = (operation.a, operation.scaling, operation.grouping)
        epilogues = self.grouped_epilogues if operation.is_grouped else self.epilogues
        return (
            arch.name in self.architectures
            and (arch.reads_fp8 or not operation.is_narrow_float)
            and {operation.a, operation.b} <= self.operands
            and (operation.a is not Element.TF32 or operation.layout.is_k_major)
            and operation.grouping in self.groupings
            and (operation.scaling is default or scaling in self.scalings)
            and operation.epilogue in epilogues
            and (self.symmetric or not operation.symmetric)
            and (arch is SM90 or bool(generated.kernels(operation.of_kernels, arch)))
        )

    def kernels(
        self, problem: Problem, arch: Architecture, level: Level
    ) -> tuple[CutlassKernel, ...]:
        # `alike` maps the problems that all rules judge alike to one key of the caches of `legal`.
        return self.legal(alike(of_kernels(problem), arch), arch, level)

    def launches(self, kernel: AnyKernel, problem: Problem, device: DeviceModel) -> list[Launch]:
        return launches(cutlass(kernel), problem, device)

    def refusal(self, kernel: AnyKernel, problem: Problem | None = None) -> str | None:
        """The reason why a kernel is not legal, or not for `problem`; None if it is legal."""
        if reason := _kernel_refusal(self, cutlass(kernel)):
            return reason
        return None if problem is None else legality.problem_refusal(kernel, problem)

    def part(self, kernel: AnyKernel) -> Part:
        return self.write(cutlass(kernel))

    def variety(self, kernel: AnyKernel) -> tuple[object, ...]:
        """Everything that a kernel's templates depend on except cluster and stages."""
        choices = cutlass(kernel)
        return (
            choices.tile,
            choices.mainloop,
            choices.epilogue,
            choices.scheduler,
            choices.swapped,
            choices.fast_accumulation,
            choices.alignment_a,
        )

    def features(self, kernel: AnyKernel) -> Features[float]:
        return features(cutlass(kernel))


@lru_cache(maxsize=4096)
def _kernel_refusal(backend: CutlassBackend, kernel: CutlassKernel) -> str | None:
    """The reason why the kernel is legal for no problem; cached, as problems share kernels."""
    if reason := operation_exists(kernel):
        return reason
    if generated.is_generated(kernel):
        return None
    return choice_refusal(kernel, backend.rules) or fields_follow_name(kernel)
