"""C++ that the backends made of CUTLASS's parts have in common: CUTLASS's own text, and traits."""

from __future__ import annotations

from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance, EmitGemmUniversalInstance

from gemmsmith.core.epilogue import Activation
from gemmsmith.core.kernel import CutlassKernel
from tuner.backends.backend import Part
from tuner.backends.cutlass import HEADERS
from tuner.backends.cutlass.generated import described
from tuner.backends.cutlass.operation import scales_rows, stores_itself, struct_suffix

ACTIVATIONS = {
    None: "Identity",
    Activation.GELU_TANH: "TanhGELU",
    Activation.GELU: "GELU",
    Activation.SILU: "SiLU",
    Activation.RELU2: "SquaredReLU",
}
"""What `activations.hpp` calls them."""


def emitted(
    kernel: CutlassKernel,
    emitter: EmitGemmUniversal3xInstance | EmitGemmUniversalInstance,
    scaled_epilogue: str,
    row_scaled_epilogue: str = "",
    fused_epilogue: str = "",
) -> str:
    """CUTLASS's text that defines a struct of the operation's name.

    The emitters know CUTLASS's epilogue functors by enumerator only; ours, which apply scales and
    more, are text.
    """
    if kernel.operation.is_fused:
        emitter.builtin_epilogue_functor_template = fused_epilogue
    elif scales_rows(kernel) and stores_itself(kernel):
        emitter.builtin_epilogue_functor_template = row_scaled_epilogue
    elif kernel.operation.is_narrow_float:
        emitter.builtin_epilogue_functor_template = scaled_epilogue
    operation = described(kernel)
    text: str = emitter.emit(operation)
    return text.strip().replace(operation.procedural_name(), struct(kernel)) + "\n"


def struct(kernel: CutlassKernel) -> str:
    """The name of what CUTLASS's text defines: unique among kernels that differ in it."""
    name: str = described(kernel).procedural_name()
    return f"{name}{struct_suffix(kernel)}"


def part(kernel: CutlassKernel, *, header: str, definition: str, adapter: str) -> Part:
    """The kernel's share of a unit, with the adapter of that header around its definition."""
    return Part(
        header=f"gemmsmith/{header}.hpp",
        definition=definition,
        entry=f'entry<gemmsmith::{adapter}>("{kernel.name}")',
        include=(HEADERS,),
    )


def traits(kernel: CutlassKernel, alignment: int) -> str:
    """`alignment` of A and B: of the operation, or of what is given to a kernel that copies."""
    values = (
        boolean(kernel.layout.a_row_major),
        boolean(kernel.layout.b_row_major),
        str(alignment),
        str(alignment),
        str(kernel.alignment_d),
    )
    return f"gemmsmith::Traits<{', '.join(values)}>"


def row_scales(kernel: CutlassKernel) -> str:
    """The last argument of an adapter that stores D itself, where there are factors per row."""
    return ", true" if scales_rows(kernel) else ""


def boolean(value: bool) -> str:
    """As C++ writes it."""
    return "true" if value else "false"
