"""The backend `cutlass2x`."""

from __future__ import annotations

from typing import Final

from gemmsmith.core.kernel import AnyKernel, Backend, CutlassKernel, cutlass
from gemmsmith.core.problem import Problem
from tuner.arch import ARCHITECTURES, Architecture
from tuner.backends.backend import Level, Part
from tuner.backends.cutlass.shared import FLOATS, CutlassBackend
from tuner.backends.cutlass2x import multistage as space
from tuner.backends.cutlass2x.build import part
from tuner.backends.cutlass2x.rules import RULES


class Cutlass2x(CutlassBackend):
    """Instances of CUTLASS 2.x's `GemmUniversal`."""

    name = Backend.CUTLASS2X
    rules = RULES
    architectures = frozenset(ARCHITECTURES)
    operands = FLOATS

    def legal(
        self, problem: Problem, arch: Architecture, level: Level
    ) -> tuple[CutlassKernel, ...]:
        return space.legal(problem, arch, level)

    def part(self, kernel: AnyKernel) -> Part:
        return part(cutlass(kernel))


CUTLASS2X: Final = Cutlass2x()
