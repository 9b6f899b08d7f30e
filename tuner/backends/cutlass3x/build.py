"""The C++ of CUTLASS 3.x kernels: CUTLASS's own text, and adapters of this project around it."""

from __future__ import annotations

from cutlass_library.gemm_operation import EmitGemmUniversal3xInstance
from cutlass_library.library import DataTypeTag, KernelScheduleTag

from gemmsmith.core.epilogue import StepKind
from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Grouping, Operation
from tuner.backends.backend import Part
from tuner.backends.cutlass import footprint, text
from tuner.backends.cutlass.generated import described
from tuner.backends.cutlass.operation import DATA_TYPES, is_padded

_SCALED_EPILOGUE = (
    "gemmsmith::ScaledLinearCombination<"
    "${element_d}, ${element_epilogue}, ${element_c}, ${element_epilogue}>"
)

_ROW_SCALED_EPILOGUE = _SCALED_EPILOGUE.replace("::Scaled", "::RowScaled")

_FUSED_EPILOGUE = "gemmsmith::Fused<{expression}, {swapped}, ${{element_d}}, ${{element_epilogue}}>"

_GATED = """using {name}_tile = cute::Shape<{tile}>;
using {name}_epilogue = gemmsmith::GatedEpilogue<
    {name}_tile, gemmsmith::activation::{activation}, {aux}, {scaled}, {pingpong}, {d}>;
using {name}_mainloop = gemmsmith::GatedMainloop<{promoting}
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    {a},
    {b},
    {sums},
    {name}_tile,
    cute::Shape<{cluster}, cute::_1>,
    {stages},
    {schedule}
  >::CollectiveOp{end};
using {name} = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, {name}_mainloop, {name}_epilogue,
    cutlass::gemm::PersistentScheduler>;
"""

_SYMMETRIC_EPILOGUE = "gemmsmith::Mirrored<${element_d}, ${element_epilogue}>"

_TRIANGLE_TAG = ("cutlass::gemm::PersistentScheduler>", "gemmsmith::TriangleScheduler>")

_STREAM_K_TAG = ("cutlass::gemm::StreamKScheduler>", "gemmsmith::StreamKScheduler>")
"""CUTLASS's scheduler, and `stream_k.hpp`'s, which replaces it: CUTLASS's does not compile with
programmatic dependent launch."""


def part(kernel: CutlassKernel) -> Part:
    """The kernel's share of a translation unit."""
    operation = described(kernel)
    traits = text.traits(kernel, operation.A.alignment)
    swapped = text.boolean(kernel.swapped)
    struct = text.struct(kernel)
    if kernel.operation.is_grouped:
        depth = text.boolean(kernel.operation.grouping is Grouping.DEPTH)
        adapter = f"Grouped3x<{struct}, {traits}, {swapped}, {depth}>"
    elif kernel.scheduler is TileScheduler.SPLIT_K:
        element_d = DataTypeTag[DATA_TYPES[kernel.operation.d]]
        adapter = f"SplitKGemm<{struct}, {traits}, {swapped}, {element_d}{text.row_scales(kernel)}>"
    elif kernel.operation.epilogue.is_gated:
        return text.part(
            kernel,
            header="gated3x",
            definition=_gated(kernel),
            adapter=f"GatedGemm3x<{struct}, {traits}>",
        )
    elif kernel.operation.epilogue.sums_rows:
        adapter = f"SummingGemm3x<{struct}, {traits}, {swapped}>"
    elif kernel.operation.symmetric:
        adapter = f"SymmetricGemm3x<{struct}, {traits}>"
    elif kernel.operation.is_fused:
        adapter = f"FusedGemm3x<{struct}, {traits}, {swapped}>"
    else:
        adapter = f"Gemm3x<{struct}, {traits}, {swapped}>"
    if is_padded(kernel):
        # The adapter inside reads aligned copies, the outer one the operands as they are.
        unaligned = text.traits(kernel, kernel.alignment_a)
        adapter = f"PaddedGemm<gemmsmith::{adapter}, {unaligned}>"
    definition = text.emitted(
        kernel,
        EmitGemmUniversal3xInstance(),
        _SCALED_EPILOGUE,
        _ROW_SCALED_EPILOGUE,
        # `Grouped3x` has no epilogue: gates of groups have kernels of the backend `cute`.
        "" if kernel.operation.is_grouped else _fused_epilogue(kernel),
    )
    return text.part(
        kernel,
        header=_header(kernel),
        definition=definition.replace(
            *(_TRIANGLE_TAG if kernel.operation.symmetric else _STREAM_K_TAG)
        ),
        adapter=adapter,
    )


def _gated(kernel: CutlassKernel) -> str:
    """CUTLASS's kernel with the mainloop of `gated_mainloop.hpp` and the epilogue of `gated3x.hpp`.

    CUTLASS's emitter cannot write it: it writes collectives by their builders only.
    """
    operation, epilogue = described(kernel), kernel.operation.epilogue
    return _GATED.format(
        name=text.struct(kernel),
        tile=text.static(kernel.tile),
        cluster=text.static(kernel.cluster),
        activation=epilogue.activation,
        aux=text.boolean(epilogue.stores_aux),
        scaled=text.boolean(kernel.operation.is_scaled),
        pingpong=text.boolean(kernel.mainloop is MainloopSchedule.PINGPONG),
        a=text.operand(operation.A),
        b=text.operand(operation.B),
        d=DataTypeTag[DATA_TYPES[kernel.operation.d]],
        sums=DataTypeTag[DATA_TYPES[kernel.operation.accumulator]],
        stages=f"cutlass::gemm::collective::StageCount<{footprint.stages(kernel)}>",
        schedule=KernelScheduleTag[operation.kernel_schedule],
        promoting="gemmsmith::PromotingMainloop<" if _promotes(kernel) else "",
        end=">>" if _promotes(kernel) else ">",
    )


def _promotes(kernel: CutlassKernel) -> bool:
    """Whether FP8 sums are promoted from the tensor core to FP32 registers."""
    return kernel.operation.is_narrow_float and not kernel.fast_accumulation


def _fused_epilogue(kernel: CutlassKernel) -> str:
    """The fusion operation of `fused3x.hpp`. CUTLASS's emitter fills in the element types of D and
    of the computation.
    """
    if kernel.operation.symmetric:
        return _SYMMETRIC_EPILOGUE
    return _FUSED_EPILOGUE.format(
        expression=_expression(kernel.operation), swapped=text.boolean(kernel.swapped)
    )


def _expression(operation: Operation) -> str:
    """What follows the product, of the nodes of `fused3x.hpp` and `differentiate.hpp`."""
    if backward := operation.epilogue.backward:
        parts = (backward.gated, backward.activated, backward.bias_gradient)
        slope = _node(f"slope::{backward.activation}")
        return _node("Differentiate", slope, *map(text.boolean, parts))
    d = "${element_d}"
    bias = DataTypeTag[DATA_TYPES[operation.bias]] if operation.stores_fp8 else d
    operands = {
        "bias": _node("Bias", bias),
        "residual": _node("Residual", d),
        "row_scale": _node("RowScale"),
        "column_scale": _node("ColumnScale", d),
    }
    alpha = _node("ScaledAlpha" if operation.is_scaled else "Alpha")
    value, factor = _node("Accumulator"), alpha
    for step in operation.epilogue.steps:
        # A factor waits for the next step: with an addend it is one instruction. alpha does not
        # wait for a residual, which CUTLASS loads as C.
        if factor and step.kind is StepKind.ADD and (step.by == "bias" or factor != alpha):
            value, factor = _node("MultiplyAdd", factor, value, operands[step.by]), ""
            continue
        value, factor = _node("Multiply", factor, value) if factor else value, ""
        match step.kind:
            case StepKind.MULTIPLY:
                factor = operands[step.by]
            case StepKind.ADD:
                value = _node("Add", operands[step.by], value)
            case StepKind.STORE:
                value = _node("Store", value)
            case StepKind.APPLY:
                value = _node("Apply", _node(f"activation::{step.by}"), value)
            case _:
                raise NotImplementedError(f"no node for {step}")  # gates have their own kernels
    value = _node("Multiply", factor, value) if factor else value
    if operation.stores_fp8:
        value = _node("Multiply", _node("OutputScale"), _node("StoreAmax", value))
    return value


def _node(name: str, *arguments: str) -> str:
    return f"gemmsmith::{name}" + (f"<{', '.join(arguments)}>" if arguments else "")


def _header(kernel: CutlassKernel) -> str:
    """The header that defines the adapter in the kernel's entry."""
    if kernel.operation.is_grouped:
        return "grouped3x"
    if kernel.operation.epilogue.backward:
        return "differentiate"
    if kernel.operation.is_fused:
        return "fused3x"
    if kernel.operation.symmetric:
        return "symmetric"
    if is_padded(kernel):
        return "padded"
    return {
        TileScheduler.STREAM_K: "stream_k",
        TileScheduler.SPLIT_K: "split_k",
    }.get(kernel.scheduler, "gemm3x")
