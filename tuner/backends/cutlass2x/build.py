"""The C++ of CUTLASS 2.x kernels: CUTLASS's own text, and an adapter of this project around it."""

from __future__ import annotations

from cutlass_library.gemm_operation import EmitGemmUniversalInstance

from gemmsmith.core.kernel import CutlassKernel
from tuner.backends.backend import Part
from tuner.backends.cutlass import text
from tuner.backends.cutlass.generated import described

_SCALED_EPILOGUE = (
    "gemmsmith::thread::ScaledLinearCombination<"
    "${element_c}, ${epilogue_vector_length}, ${element_accumulator}, ${element_epilogue}>"
)


def part(kernel: CutlassKernel) -> Part:
    """The kernel's share of a translation unit."""
    operation = described(kernel)
    traits = text.traits(kernel, operation.A.alignment)
    return text.part(
        kernel,
        header="gemm2x",
        definition=text.emitted(kernel, EmitGemmUniversalInstance(), _SCALED_EPILOGUE),
        adapter=f"Gemm2x<{operation.procedural_name()}, {traits}>",
    )
