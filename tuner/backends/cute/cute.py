"""The backend `cute`."""

from __future__ import annotations

from typing import Final

from gemmsmith.core.kernel import AnyKernel, Backend, CutlassKernel, cutlass
from gemmsmith.core.operation import Element, Epilogue, Grouping, Scaling
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture
from tuner.backends.backend import Level, Part
from tuner.backends.cute import own_kernels as space
from tuner.backends.cute.build import part
from tuner.backends.cute.rules import RULES
from tuner.backends.cutlass.shared import FLOATS, CutlassBackend


class Cute(CutlassBackend):
    """This project's own kernels around CUTLASS's mainloop."""

    name = Backend.CUTE
    rules = RULES
    architectures = frozenset({"sm90"})
    operands = FLOATS | {Element.S8, Element.TF32}
    scalings = frozenset(
        {
            (Element.S8, Scaling.ROW, Grouping.NONE),
            (Element.E4M3, Scaling.ROW, Grouping.NONE),
            (Element.E5M2, Scaling.ROW, Grouping.NONE),
            (Element.E4M3, Scaling.ROW, Grouping.ROWS),
        }
    )
    groupings = frozenset({Grouping.NONE, Grouping.ROWS})
    grouped_epilogues = frozenset(
        {Epilogue.NONE, *(epilogue for epilogue in Epilogue if epilogue.is_gated)}
    )

    def legal(
        self, problem: Problem, arch: Architecture, level: Level
    ) -> tuple[CutlassKernel, ...]:
        return space.legal(problem, arch, level)

    def part(self, kernel: AnyKernel) -> Part:
        return part(cutlass(kernel))


CUTE: Final = Cute()
