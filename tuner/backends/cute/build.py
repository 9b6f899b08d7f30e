"""What our own kernels are compiled from: CUTLASS's mainloop, and the kernel around it."""

from __future__ import annotations

from cutlass_library.library import DataTypeTag, KernelScheduleTag, LayoutTag

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
    """The kernel's share of a unit."""
    described = gemm_operation(kernel)
    traits = text.traits(kernel, described.A.alignment)
    element_d = DataTypeTag[DATA_TYPES[kernel.operation.d]]
    swapped = text.boolean(kernel.swapped)
    if kernel.scheduler is TileScheduler.GROUPS:
        epilogue = kernel.operation.epilogue
        adapter, last = "GroupedGemm", text.row_scales(kernel)
        if epilogue.is_gated:
            stored = text.boolean(epilogue.stores_aux)
            adapter, last = (
                "GroupedGatedGemm",
                f", gemmsmith::{text.ACTIVATIONS[epilogue.activation]}, {stored}",
            )
        return text.part(
            kernel,
            header="grouped_gate" if epilogue.is_gated else "grouped",
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
    tile = ", ".join(f"cute::Int<{extent}>" for extent in kernel.tile)
    a, b = (
        f"{DataTypeTag[each.element]}, {LayoutTag[each.layout]}, {each.alignment}"
        for each in (described.A, described.B)
    )
    return _MAINLOOP.format(
        name=kernel.name,
        a=a,
        b=b,
        sums=DataTypeTag[DATA_TYPES[kernel.operation.accumulator]],
        tile=tile,
        stages=stages(kernel),
        schedule=KernelScheduleTag[described.kernel_schedule],
    )
