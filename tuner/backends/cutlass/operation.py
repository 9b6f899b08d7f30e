"""A kernel as a `cutlass_library.GemmOperation`, from which C++ is emitted and names are derived.

Invariants: `name_of(kernel) == kernel.name`, and no two kernels of the space share a name. If a
kernel is just `gemm_operation(kernel)`, its name is CUTLASS's procedural name of that operation.
That name leaves out a few fields, so these conventions hold:

* The scheduler follows from the mainloop: ping-pong and cooperative kernels are persistent, plain
  warp-specialized kernels launch one block per tile. The name says if it is stream-K.
* A and B share one alignment, the one in the name. D's follows from the epilogue: 16 bytes for TMA,
  1 element for the others, which store element by element.
* A swapped kernel is CUTLASS's kernel with column-major D: Dᵀ[N,M] = Bᵀ[N,K] · Aᵀ[K,M]. Reading
  a matrix transposed flips its layout letter, so problem layout `xy` becomes kernel layout
  `ȳx̄` (tn→tn, tt→nn, nt→nt, nn→tt), and the third letter, `n`, says that it is swapped.
* The name of a kernel that is more than one operation has a suffix or prefix. `_split_k` kernels
  compute partial sums with a CUTLASS kernel and add them with one of ours, which stores D in the
  type that follows. `gemmsmith…_cluster_split_k` and `gemmsmith…_groups` kernels are our own
  around CUTLASS's mainloop. TMA kernels with `align1` copy operands that TMA cannot read.
  `_scale_row` kernels apply factors per row and column, `_then_…` kernels the named epilogue;
  `_symmetric` kernels compute half of the tiles and store them twice.
* CUTLASS's library describes 2.x operations with column-major D, and its emitter transposes them
  back: the emitted kernel has the problem's own orientation, and is not swapped. Their names end
  with the architecture unless it is sm90.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass_library.gemm_operation import GemmOperation
from cutlass_library.library import (
    DataType,
    EpilogueFunctor,
    EpilogueScheduleType,
    GemmKind,
    KernelScheduleType,
    LayoutType,
    MathInstruction,
    MathOperation,
    OpcodeClass,
    SwizzlingFunctor,
    TensorDescription,
    TileDescription,
    TileSchedulerType,
    to_grouped_schedule,
)
from msgspec import structs

from gemmsmith.core.kernel import (
    CUTLASS_KERNELS,
    Backend,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Element, Operation, Scaling

DATA_TYPES = {
    Element.BF16: DataType.bf16,
    Element.F16: DataType.f16,
    Element.E4M3: DataType.e4m3,
    Element.E5M2: DataType.e5m2,
    Element.S8: DataType.s8,
    Element.TF32: DataType.f32,  # the type in memory; TMA rounds it while loading
    Element.F32: DataType.f32,
    Element.S32: DataType.s32,
}

_INSTRUCTION_TYPES = {**DATA_TYPES, Element.TF32: DataType.tf32}

_TMA_SCHEDULES = {
    (MainloopSchedule.WARP_SPECIALIZED, False): KernelScheduleType.TmaWarpSpecialized,
    (MainloopSchedule.PINGPONG, False): KernelScheduleType.TmaWarpSpecializedPingpong,
    (MainloopSchedule.COOPERATIVE, False): KernelScheduleType.TmaWarpSpecializedCooperative,
    (MainloopSchedule.WARP_SPECIALIZED, True): KernelScheduleType.TmaWarpSpecializedFP8FastAccum,
    (MainloopSchedule.PINGPONG, True): KernelScheduleType.TmaWarpSpecializedPingpongFP8FastAccum,
    (
        MainloopSchedule.COOPERATIVE,
        True,
    ): KernelScheduleType.TmaWarpSpecializedCooperativeFP8FastAccum,
}

_CPASYNC = MainloopSchedule.CPASYNC_WARP_SPECIALIZED
_CPASYNC_SCHEDULES = {
    TileScheduler.GRID: KernelScheduleType.CpAsyncWarpSpecialized,
    TileScheduler.PERSISTENT: KernelScheduleType.CpAsyncWarpSpecializedCooperative,
}

_TILE_SCHEDULERS = {
    TileScheduler.GRID: TileSchedulerType.Default,
    TileScheduler.PERSISTENT: TileSchedulerType.Persistent,
    TileScheduler.STREAM_K: TileSchedulerType.StreamK,
    TileScheduler.SPLIT_K: TileSchedulerType.Persistent,
    TileScheduler.CLUSTER_SPLIT_K: TileSchedulerType.Default,
    TileScheduler.GROUPS: TileSchedulerType.Default,
}

OWN_SCHEDULERS = (TileScheduler.CLUSTER_SPLIT_K, TileScheduler.GROUPS)
"""Tile schedulers of this project's own kernels."""

_WARPS_2X = {
    (256, 128): (4, 2, 1),
    (128, 256): (2, 4, 1),
    (128, 128): (2, 2, 1),
    (128, 64): (2, 2, 1),
    (64, 128): (2, 2, 1),
    (64, 64): (2, 2, 1),
}
"""Warps along (M, N, K) of the 2.x tiles; each warp computes 32×32, 64×32, 32×64 or 64×64."""

TMA_BYTES = 16
"""Every row that TMA reads must start at a multiple of this (`tma_alignment_bytes`)."""

_DEFAULT_ARCH = "sm90"
"""The architecture that the names of 2.x kernels leave out, as CUTLASS's names do."""


class OperandTypes(NamedTuple):
    """The kernel's two operands: element types and layout letters."""

    element_a: Element
    element_b: Element
    a_row_major: bool
    b_row_major: bool


def operands(operation: Operation, *, swapped: bool) -> OperandTypes:
    """The kernel's first and second operand for a problem's types and layout."""
    layout = operation.layout
    if not swapped:
        return OperandTypes(operation.a, operation.b, layout.a_row_major, layout.b_row_major)
    return OperandTypes(operation.b, operation.a, not layout.b_row_major, not layout.a_row_major)


def warps_2x(tile: tuple[int, int, int]) -> tuple[int, int, int] | None:
    return _WARPS_2X.get(tile[:2])


def kernel(
    *,
    operation: Operation,
    tile: tuple[int, int, int],
    cluster: tuple[int, int] = (1, 1),
    stages: int = 0,
    mainloop: MainloopSchedule,
    epilogue: EpilogueSchedule,
    scheduler: TileScheduler,
    alignment: int,
    swapped: bool = False,
    fast_accumulation: bool = False,
    arch: str = "sm90",
    name: bool = True,
) -> CutlassKernel:
    """A kernel with its name, which need not be legal.

    The name is most of the cost. An enumerator that drops most kernels passes `name=False`, and
    names the remaining ones.
    """
    backend = CUTLASS_KERNELS[backend_of(mainloop, scheduler)]
    unnamed = backend(
        name="",
        arch=arch,
        dtype=operation.dtype,
        layout=operation.layout,
        alignment_a=alignment,
        alignment_b=alignment,
        alignment_d=128 // operation.d.bits if epilogue is EpilogueSchedule.TMA else 1,
        tile=tile,
        cluster=cluster,
        stages=stages,
        mainloop=mainloop,
        epilogue=epilogue,
        scheduler=scheduler,
        swapped=swapped,
        fast_accumulation=fast_accumulation,
    )
    return named(unnamed) if name else unnamed


def backend_of(mainloop: MainloopSchedule, scheduler: TileScheduler) -> Backend:
    if mainloop is MainloopSchedule.MULTISTAGE:
        return Backend.CUTLASS2X
    return Backend.CUTE if scheduler in OWN_SCHEDULERS else Backend.CUTLASS3X


def named(kernel: CutlassKernel) -> CutlassKernel:
    return structs.replace(kernel, name=name_of(kernel))


def of_type(kernel: CutlassKernel, dtype: str) -> CutlassKernel:
    """The kernel with the same choices for another element type of the same width."""
    return kernel if kernel.dtype == dtype else named(structs.replace(kernel, dtype=dtype))


def name_of(kernel: CutlassKernel) -> str:
    """The kernel's name: CUTLASS's procedural name, with what the conventions above add to it."""
    name = struct_of(kernel)
    if kernel.scheduler is TileScheduler.SPLIT_K:
        # The partial sums have one type whatever D is, so the attributes of the dtype that follow
        # its short name (such as `.out_f32`) are needed to tell such kernels apart.
        _, *attributes = kernel.operation.dtype.split(".")
        return "_".join([name, "split_k", *attributes])
    if kernel.backend is Backend.CUTE:
        name = f"{name.replace('cutlass3x', 'gemmsmith', 1)}_{kernel.scheduler}"
        return f"{name}{struct_suffix(kernel) or ('_scale_row' if scales_rows(kernel) else '')}"
    if kernel.backend is Backend.CUTLASS2X and kernel.arch != _DEFAULT_ARCH:
        return f"{name}_{kernel.arch}"
    if is_padded(kernel):
        return name.replace(f"_align{tma_alignment(kernel.operation)}_", "_align1_", 1)
    return name


def struct_of(kernel: CutlassKernel) -> str:
    """The name of the type that CUTLASS's text defines; kernels that share it share that text."""
    name: str = gemm_operation(kernel).procedural_name()
    return name if kernel.backend is Backend.CUTE else f"{name}{struct_suffix(kernel)}"


def struct_suffix(kernel: CutlassKernel) -> str:
    """The part of the type's name that CUTLASS's names leave out: the epilogue."""
    if kernel.operation.is_fused:
        return f"_then_{kernel.operation.epilogue.value}"
    if kernel.operation.symmetric:
        return "_symmetric"
    return "_scale_row" if scales_rows(kernel) and stores_itself(kernel) else ""


def scales_rows(kernel: CutlassKernel) -> bool:
    return kernel.operation.scaling is Scaling.ROW


def stores_itself(kernel: CutlassKernel) -> bool:
    """Whether CUTLASS's epilogue stores D; otherwise a kernel of ours does, from partial sums."""
    return kernel.scheduler not in (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)


def is_padded(kernel: CutlassKernel) -> bool:
    """Whether operands that TMA cannot read are copied into the workspace first."""
    tma = kernel.backend is Backend.CUTLASS3X and kernel.mainloop is not _CPASYNC
    return tma and kernel.alignment_a == 1


def tma_alignment(operation: Operation) -> int:
    return TMA_BYTES * 8 // operation.a.bits


def gemm_operation(kernel: CutlassKernel) -> GemmOperation:
    """The operation that CUTLASS's own emitters turn into C++.

    `EmitGemmUniversal3xInstance` is for `cutlass3x` kernels, `EmitGemmUniversalInstance` for
    `cutlass2x` kernels. Only the mainloop of a `cute` kernel is CUTLASS's.
    """
    return _operation_2x(kernel) if kernel.backend is Backend.CUTLASS2X else _operation_3x(kernel)


def _tensors(
    kernel: CutlassKernel, *, transposed: bool
) -> tuple[TensorDescription, TensorDescription, TensorDescription]:
    types = operands(kernel.operation, swapped=transposed)
    alignment = tma_alignment(kernel.operation) if is_padded(kernel) else kernel.alignment_a
    d, alignment_d = kernel.operation.d, kernel.alignment_d
    if kernel.scheduler is TileScheduler.SPLIT_K:
        d, alignment_d = kernel.operation.accumulator, 4
    return (
        _tensor(DATA_TYPES[types.element_a], types.a_row_major, alignment),
        _tensor(DATA_TYPES[types.element_b], types.b_row_major, alignment),
        _tensor(DATA_TYPES[d], not transposed, alignment_d),
    )


def _tensor(element: DataType, row_major: bool, alignment: int) -> TensorDescription:
    layout = LayoutType.RowMajor if row_major else LayoutType.ColumnMajor
    return TensorDescription(element, layout, alignment)


def _operation_2x(kernel: CutlassKernel) -> GemmOperation:
    a, b, d = _tensors(kernel, transposed=True)
    fp8 = kernel.operation.is_narrow_float
    arch = 89 if fp8 else 80
    shape = [16, 8, 32 if fp8 else 16]
    instruction = _instruction(shape, a.element, b.element, DataType.f32)
    warps = warps_2x(kernel.tile) or (2, 2, 1)  # illegal tiles have names too
    description = TileDescription(
        list(kernel.tile), kernel.stages, list(warps), instruction, arch, 90
    )
    return GemmOperation(
        GemmKind.Universal,
        arch,
        description,
        a,
        b,
        d,
        DataType.f32,
        EpilogueFunctor.LinearCombination,
        SwizzlingFunctor.Identity8,
    )


def _operation_3x(kernel: CutlassKernel) -> GemmOperation:
    a, b, d = _tensors(kernel, transposed=kernel.swapped)
    types = operands(kernel.operation, swapped=kernel.swapped)
    shape = [64, kernel.tile[1], 256 // kernel.operation.a.bits]
    accumulator = DATA_TYPES[kernel.operation.accumulator]
    instruction = _instruction(
        shape,
        _INSTRUCTION_TYPES[types.element_a],
        _INSTRUCTION_TYPES[types.element_b],
        accumulator,
    )
    description = TileDescription(
        list(kernel.tile), kernel.stages, [4, 1, 1], instruction, 90, 90, [*kernel.cluster, 1]
    )
    scheduler = _TILE_SCHEDULERS[kernel.scheduler]
    if (kernel.mainloop, kernel.scheduler) == (
        MainloopSchedule.WARP_SPECIALIZED,
        TileScheduler.SPLIT_K,
    ):
        scheduler = TileSchedulerType.Default  # one block per tile and slice
    if kernel.mainloop is _CPASYNC:
        schedule = _CPASYNC_SCHEDULES[kernel.scheduler]
    else:
        schedule = _TMA_SCHEDULES[kernel.mainloop, kernel.fast_accumulation]
    if kernel.epilogue is not EpilogueSchedule.TMA:
        epilogue = EpilogueScheduleType.NoSmemWarpSpecialized
    elif kernel.mainloop is MainloopSchedule.COOPERATIVE:
        epilogue = EpilogueScheduleType.TmaWarpSpecializedCooperative
    else:
        epilogue = EpilogueScheduleType.TmaWarpSpecialized
    grouped = kernel.operation.is_grouped and kernel.backend is Backend.CUTLASS3X
    if grouped:
        scheduler = TileSchedulerType.Default  # CUTLASS's group scheduler
    source = d
    # Without a C to read, the epilogue needs no buffers for it.
    if kernel.operation.is_fused and not kernel.operation.epilogue.reads:
        source = TensorDescription(DataType.void, d.layout, d.alignment)
    return GemmOperation(
        GemmKind.GroupedUniversal3x if grouped else GemmKind.Universal3x,
        90,
        description,
        a,
        b,
        source,
        DATA_TYPES[_epilogue_type(kernel)],
        D=d,
        kernel_schedule=to_grouped_schedule(schedule, grouped),
        epilogue_schedule=to_grouped_schedule(epilogue, grouped),
        tile_scheduler=scheduler,
    )


def _epilogue_type(kernel: CutlassKernel) -> Element:
    # Integers are stored exactly, so the epilogue must not pass them through FP32.
    sums = kernel.operation.accumulator
    stored = kernel.operation.d if stores_itself(kernel) else sums
    return sums if stored.is_integer else Element.F32


def _instruction(shape: list[int], a: DataType, b: DataType, sums: DataType) -> MathInstruction:
    return MathInstruction(shape, a, b, sums, OpcodeClass.TensorOp, MathOperation.multiply_add)
