"""The backend `cutlass3x`: instances of CUTLASS 3.x's `GemmUniversal`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import TMA_MAINLOOPS, Backend, CutlassKernel
from gemmsmith.core.operation import Element, Epilogue, Grouping, Scaling
from gemmsmith.core.problem import Problem
from tuner.arch import architecture
from tuner.backends.backend import Level
from tuner.backends.cutlass.shared import FLOATS, CutlassBackend
from tuner.backends.cutlass3x import fitted
from tuner.backends.cutlass3x.build import part
from tuner.backends.cutlass3x.families import legal
from tuner.backends.cutlass3x.rules import RULES


class Cutlass3x(CutlassBackend):
    """The backend, which also fits tiles to a problem."""

    def fitted(self, problem: Problem, device: DeviceModel) -> Sequence[CutlassKernel]:
        """Kernels whose tiles fill whole waves; none if TMA mainloops cannot read the problem."""
        like = self._like(problem, device)
        return () if like is None else fitted.kernels(like, problem, device)

    def prepare(self, problem: Problem, device: DeviceModel) -> None:
        like = self._like(problem, device)
        if like is not None:
            fitted.build(like)

    def _like(self, problem: Problem, device: DeviceModel) -> CutlassKernel | None:
        """A kernel that has the fitted kernels' types, layout, alignment and epilogue."""
        if problem.operation.symmetric:  # all its widths are in the list
            return None
        kernels = self.kernels(problem, architecture(device.arch), Level.CORE)
        return kernels[0] if kernels and kernels[0].mainloop in TMA_MAINLOOPS else None


CUTLASS3X: Final = Cutlass3x(
    name=Backend.CUTLASS3X,
    rules=RULES,
    legal=legal,
    write=part,
    architectures=frozenset({"sm90", "sm100"}),
    operands=FLOATS | {Element.S8, Element.TF32},
    scalings=frozenset(
        (element, Scaling.ROW, Grouping.NONE)
        for element in (Element.S8, Element.E4M3, Element.E5M2)
    ),
    groupings=frozenset(Grouping),
    epilogues=frozenset(Epilogue),
    symmetric=True,
)
