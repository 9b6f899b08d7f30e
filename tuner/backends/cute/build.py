"""The C++ of this project's own kernels: CUTLASS's mainloop, and an adapter of ours around it."""

from __future__ import annotations

from cutlass_library.library import DataTypeTag, KernelScheduleTag

from gemmsmith.core.kernel import CutlassKernel, TileScheduler
from tuner.backends.backend import Part
from tuner.backends.cutlass import text
from tuner.backends.cutlass.footprint import math_groups, stages
from tuner.backends.cutlass.operation import DATA_TYPES, gemm_operation

_MAINLOOP = """using {name} =
  typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    {a},
    {b},
    {sums},
    cute::Shape<{tile}>,
    cute::Shape<cute::_1, cute::_1, cute::_1>,
    cutlass::gemm::collective::StageCount<{stages}>,
    {schedule}
  >::CollectiveOp;
"""


def part(kernel: CutlassKernel) -> Part:
    """The kernel's share of a translation unit."""
    described = gemm_operation(kernel)
    traits = text.traits(kernel, described.A.alignment)
    element_d = DataTypeTag[DATA_TYPES[kernel.operation.d]]
    swapped = text.boolean(kernel.swapped)
    if kernel.scheduler is TileScheduler.GROUPS:
        epilogue = kernel.operation.epilogue
        header, adapter, last = "grouped", "GroupedGemm", text.row_scales(kernel)
        if epilogue.is_gated:
            header, adapter = "grouped_gate", "GroupedGatedGemm"
            stores_aux = text.boolean(epilogue.stores_aux)
            last = f", gemmsmith::activation::{epilogue.activation}, {stores_aux}"
        elif backward := epilogue.backward:
            header, adapter = "grouped_backward", "GroupedBackwardGemm"
            activated = text.boolean(backward.activated)
            last = f", gemmsmith::slope::{backward.activation}, {activated}"
        return text.part(
            kernel,
            header=header,
            definition=_mainloop(kernel),
            adapter=f"{adapter}<{kernel.name}, {element_d}, {traits}, {swapped}, "
            f"{math_groups(kernel)}{last}>",
        )
    return text.part(
        kernel,
        header="cluster_split_k",
        definition=_mainloop(kernel),
        adapter=f"ClusterSplitKGemm<{kernel.name}, {element_d}, {traits}, {swapped}"
        f"{text.row_scales(kernel)}>",
    )


def _mainloop(kernel: CutlassKernel) -> str:
    described = gemm_operation(kernel)
    return _MAINLOOP.format(
        name=kernel.name,
        a=text.operand(described.A),
        b=text.operand(described.B),
        sums=DataTypeTag[DATA_TYPES[kernel.operation.accumulator]],
        tile=text.static(kernel.tile),
        stages=stages(kernel),
        schedule=KernelScheduleTag[described.kernel_schedule],
    )
