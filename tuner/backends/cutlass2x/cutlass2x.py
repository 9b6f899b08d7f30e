"""The backend `cutlass2x`: instances of CUTLASS 2.x's `GemmUniversal`."""

from __future__ import annotations

from typing import Final

from gemmsmith.core.kernel import Backend
from tuner.arch import ARCHITECTURES
from tuner.backends.cutlass.shared import FLOATS, CutlassBackend
from tuner.backends.cutlass2x.build import part
from tuner.backends.cutlass2x.multistage import legal
from tuner.backends.cutlass2x.rules import RULES

CUTLASS2X: Final = CutlassBackend(
    name=Backend.CUTLASS2X,
    rules=RULES,
    legal=legal,
    write=part,
    architectures=frozenset(ARCHITECTURES),
    operands=FLOATS,
)
