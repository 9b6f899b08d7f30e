"""What kernels of CUTLASS 2.x are compiled from: CUTLASS's own text, and our adapter around it."""

from __future__ import annotations

from cutlass_library.gemm_operation import EmitGemmUniversalInstance

from gemmsmith.kernel import CutlassKernel
from tuner.backends.backend import Part
from tuner.backends.cutlass import text
from tuner.backends.cutlass.operation import gemm_operation

_SCALED_EPILOGUE = (
    "gemmsmith::thread::ScaledLinearCombination<"
    "${element_c}, ${epilogue_vector_length}, ${element_accumulator}, ${element_epilogue}>"
)


def part(kernel: CutlassKernel) -> Part:
    """The kernel's share of a unit."""
    described = gemm_operation(kernel)
    traits = text.traits(kernel, described.A.alignment)
    return text.part(
        kernel,
        header="gemm2x",
        definition=text.emitted(kernel, EmitGemmUniversalInstance(), _SCALED_EPILOGUE),
        adapter=f"Gemm2x<{described.procedural_name()}, {traits}>",
    )
