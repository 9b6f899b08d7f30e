"""Kernels from CUTLASS's own generators, for architectures without a curated list.

There, the kernels that `cutlass_library` instantiates by default are the whole space, and a kernel
is legal if it equals one of them in every field. CUTLASS's names of 2.x kernels leave out the
architecture; here they end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

from cutlass_library import generator
from cutlass_library.gemm_operation import GemmOperation
from cutlass_library.library import (
    DataType,
    GemmKind,
    KernelScheduleType,
    LayoutType,
    MathOperation,
    OperationKind,
    TileSchedulerType,
)
from cutlass_library.manifest import Manifest

from gemmsmith.core.kernel import (
    Cutlass2xKernel,
    Cutlass3xKernel,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Operation
from tuner.arch import ARCHITECTURES, Architecture
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import DATA_TYPES, gemm_operation, operands

_MULTISTAGE_16 = generator.GenerateSM80_TensorOp_16816
_MULTISTAGE_FP8 = generator.GenerateSM89_TensorOp_16832_fp8_fp32acc

_GENERATORS: dict[str, tuple[Callable[[Any, str], None], ...]] = {
    "sm80": (_MULTISTAGE_16,),
    "sm89": (_MULTISTAGE_16, _MULTISTAGE_FP8),
    "sm100": (
        generator.GenerateSM100_TensorOp_16b_UMMA_gemm,
        generator.GenerateSM100_TensorOp_fp8_UMMA_gemm,
    ),
    # CUTLASS has no dense kernels without block scales that are made for sm120.
    "sm120": (_MULTISTAGE_16, _MULTISTAGE_FP8),
}
_CUDA = "13.0"
"""The CUDA release passed to the generators, which leave out what older releases cannot compile."""

_TCGEN05 = {
    KernelScheduleType.TmaWarpSpecialized1SmSm100: (MainloopSchedule.TCGEN05_ONE_SM, 1),
    KernelScheduleType.TmaWarpSpecialized2SmSm100: (MainloopSchedule.TCGEN05_TWO_SM, 2),
}
"""Mainloop, and the number of thread blocks that share an instruction's rows."""


def kernels(operation: Operation, arch: Architecture) -> tuple[CutlassKernel, ...]:
    return tuple(kernel for kernel, _ in _generated(operation, arch).values())


def is_generated(kernel: CutlassKernel) -> bool:
    generated = _find(kernel)
    return generated is not None and generated[0] == kernel


def described(kernel: CutlassKernel) -> GemmOperation:
    """The kernel as CUTLASS's `GemmOperation`, which its emitters turn into C++."""
    generated = _find(kernel)
    return gemm_operation(kernel) if generated is None else generated[1]


def _find(kernel: CutlassKernel) -> tuple[CutlassKernel, GemmOperation] | None:
    arch = ARCHITECTURES.get(kernel.arch)
    if arch is None or arch.name not in _GENERATORS:
        return None
    return _generated(kernel.operation, arch).get(kernel.name)


@lru_cache(maxsize=256)
def _generated(
    operation: Operation, arch: Architecture
) -> dict[str, tuple[CutlassKernel, GemmOperation]]:
    if not {operation.a, operation.b, operation.d} <= DATA_TYPES.keys():
        return {}
    if operation.is_grouped or operation.is_fused or operation.symmetric:
        return {}
    by_name: dict[str, tuple[CutlassKernel, GemmOperation]] = {}
    for described in _operations(arch.name):
        for kernel in _kernels_of(described, operation, arch):
            if kernel.stages * footprint.stage_bytes(kernel) <= arch.shared_bytes:
                by_name.setdefault(kernel.name, (kernel, described))
    return by_name


@cache
def _operations(arch: str) -> list[GemmOperation]:
    """The dense operations that the generators give for an architecture; takes 0.25 s."""
    generated: list[GemmOperation] = []
    for generate in _GENERATORS.get(arch, ()):
        manifest = Manifest()
        manifest.kernel_filter = "*"  # without a filter, the generators leave most kernels out
        manifest.is_kernel_filter_set_to_all = False
        manifest.instantiation_level = 0
        manifest.append = generated.append
        generate(manifest, _CUDA)
    return [
        operation
        for operation in generated
        if operation.operation_kind == OperationKind.Gemm
        and operation.gemm_kind in (GemmKind.Universal, GemmKind.Universal3x)
    ]


def _kernels_of(
    described: GemmOperation, operation: Operation, arch: Architecture
) -> Iterator[CutlassKernel]:
    """Yield the kernel of a generated operation, if it computes `operation`."""
    if described.accumulator_type() != DataType.f32:
        return
    if described.is_3x:
        yield from _kernel_3x(described, operation, arch)
    else:
        yield from _kernel_2x(described, operation, arch)


def _kernel_2x(
    described: GemmOperation, operation: Operation, arch: Architecture
) -> Iterator[CutlassKernel]:
    # In CUTLASS's library D is column-major, and the emitter transposes the whole product.
    column_major = described.C.layout == LayoutType.ColumnMajor
    if not column_major or not _computes(described, operation, swapped=True):
        return
    math = described.tile_description.math_instruction.math_operation
    yield Cutlass2xKernel(
        name=f"{described.procedural_name()}_{arch.name}",
        arch=arch.name,
        dtype=operation.dtype,
        layout=operation.layout,
        alignment_a=described.A.alignment,
        alignment_b=described.B.alignment,
        alignment_d=min(described.C.alignment, 128 // operation.d.bits),
        tile=_extents(described.tile_description.threadblock_shape),
        cluster=(1, 1),
        stages=described.tile_description.stages,
        mainloop=MainloopSchedule.MULTISTAGE,
        epilogue=EpilogueSchedule.THREADBLOCK,
        scheduler=TileScheduler.GRID,
        fast_accumulation=math == MathOperation.multiply_add_fast_accum,
    )


def _kernel_3x(
    described: GemmOperation, operation: Operation, arch: Architecture
) -> Iterator[CutlassKernel]:
    swapped = described.D.layout == LayoutType.ColumnMajor
    cluster_m, cluster_n, _ = described.tile_description.cluster_shape
    if not _computes(described, operation, swapped=swapped):
        return
    if described.D.element != described.C.element:
        return
    # CUTLASS's stream-K scheduler does not compile with programmatic dependent launch, and
    # `stream_k.hpp`, which replaces it, is for sm90. A cluster of 0 is chosen by the launch, which
    # a kernel cannot express.
    if described.tile_scheduler != TileSchedulerType.Default:
        return
    if not 0 < cluster_m * cluster_n <= arch.max_cluster:
        return
    # CUTLASS's tile is that of all blocks that share an instruction, ours is that of one block.
    mainloop, sharing = _TCGEN05[described.kernel_schedule]
    m, n, k = _extents(described.get_collective_tile_shape())
    yield Cutlass3xKernel(
        name=described.procedural_name(),
        arch=arch.name,
        dtype=operation.dtype,
        layout=operation.layout,
        alignment_a=described.A.alignment,
        alignment_b=described.B.alignment,
        alignment_d=128 // operation.d.bits,
        tile=(m // sharing, n, k),
        cluster=(cluster_m, cluster_n),
        stages=0,
        mainloop=mainloop,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
        swapped=swapped,
    )


def _computes(described: GemmOperation, operation: Operation, *, swapped: bool) -> bool:
    types = operands(operation, swapped=swapped)
    return (
        described.A.element == DATA_TYPES[types.element_a]
        and described.B.element == DATA_TYPES[types.element_b]
        and described.C.element == DATA_TYPES[operation.d]
        and (described.A.layout == LayoutType.RowMajor) is types.a_row_major
        and (described.B.layout == LayoutType.RowMajor) is types.b_row_major
    )


def _extents(shape: list[int]) -> tuple[int, int, int]:
    m, n, k = shape
    return m, n, k
