"""C++ text for the backends that use CUTLASS: its emitters' output, and the adapters' arguments."""

from __future__ import annotations

from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance, EmitGemmUniversalInstance
from cutlass_library.library import DataTypeTag, LayoutTag, TensorDescription

from gemmsmith.core.kernel import CutlassKernel
from tuner.backends.backend import Part
from tuner.backends.cutlass import HEADERS
from tuner.backends.cutlass.generated import described
from tuner.backends.cutlass.operation import scales_rows, stores_itself, struct_suffix


def emitted(
    kernel: CutlassKernel,
    emitter: EmitGemmUniversal3xInstance | EmitGemmUniversalInstance,
    scaled_epilogue: str,
    row_scaled_epilogue: str = "",
    fused_epilogue: str = "",
) -> str:
    """CUTLASS's text that defines the type `struct(kernel)`.

    An emitter knows CUTLASS's epilogue functors by enumerator. Ours are passed as templates of
    text.
    """
    if kernel.operation.is_fused or kernel.operation.symmetric:
        emitter.builtin_epilogue_functor_template = fused_epilogue
    elif scales_rows(kernel) and stores_itself(kernel):
        emitter.builtin_epilogue_functor_template = row_scaled_epilogue
    elif kernel.operation.is_narrow_float:
        emitter.builtin_epilogue_functor_template = scaled_epilogue
    operation = described(kernel)
    text: str = emitter.emit(operation)
    return text.strip().replace(operation.procedural_name(), struct(kernel)) + "\n"


def struct(kernel: CutlassKernel) -> str:
    """The name of the type that CUTLASS's text defines; kernels that share it share that text."""
    name: str = described(kernel).procedural_name()
    return f"{name}{struct_suffix(kernel)}"


def part(kernel: CutlassKernel, *, header: str, definition: str, adapter: str) -> Part:
    """The kernel's share of a unit: `adapter`, a template of `header`, around `definition`."""
    return Part(
        header=f"gemmsmith/{header}.hpp",
        definition=definition,
        entry=f'entry<gemmsmith::{adapter}>("{kernel.name}")',
        include=(HEADERS,),
    )


def traits(kernel: CutlassKernel, alignment: int) -> str:
    """An adapter's `Traits`, with the alignment of A and B in elements."""
    values = (
        boolean(kernel.layout.a_row_major),
        boolean(kernel.layout.b_row_major),
        str(alignment),
        str(alignment),
        str(kernel.alignment_d),
    )
    return f"gemmsmith::Traits<{', '.join(values)}>"


def row_scales(kernel: CutlassKernel) -> str:
    """The last argument of an adapter that stores D itself, if there are factors per row."""
    return ", true" if scales_rows(kernel) else ""


def operand(tensor: TensorDescription) -> str:
    """The arguments of a `CollectiveBuilder` for an operand: element type, layout, alignment."""
    return f"{DataTypeTag[tensor.element]}, {LayoutTag[tensor.layout]}, {tensor.alignment}"


def static(extents: tuple[int, ...]) -> str:
    return ", ".join(f"cute::Int<{extent}>" for extent in extents)


def boolean(value: bool) -> str:
    return "true" if value else "false"
