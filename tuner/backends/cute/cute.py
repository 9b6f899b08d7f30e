"""The backend `cute`: this project's own kernels around CUTLASS's mainloop."""

from __future__ import annotations

from typing import Final

from gemmsmith.core.kernel import Backend
from gemmsmith.core.operation import Element, Epilogue, Grouping, Scaling
from tuner.backends.cute.build import part
from tuner.backends.cute.own_kernels import legal
from tuner.backends.cute.rules import RULES
from tuner.backends.cutlass.shared import FLOATS, CutlassBackend

CUTE: Final = CutlassBackend(
    name=Backend.CUTE,
    rules=RULES,
    legal=legal,
    write=part,
    architectures=frozenset({"sm90"}),
    operands=FLOATS | {Element.S8, Element.TF32},
    scalings=frozenset(
        {
            (Element.S8, Scaling.ROW, Grouping.NONE),
            (Element.E4M3, Scaling.ROW, Grouping.NONE),
            (Element.E5M2, Scaling.ROW, Grouping.NONE),
            (Element.E4M3, Scaling.ROW, Grouping.ROWS),
        }
    ),
    groupings=frozenset({Grouping.NONE, Grouping.ROWS}),
    grouped_epilogues=frozenset(
        epilogue
        for epilogue in Epilogue
        if epilogue is Epilogue.NONE
        or (epilogue.backward.gated if epilogue.backward else epilogue.is_gated)
    ),
)
