"""The legality rules of this project's own kernels."""

from __future__ import annotations

from gemmsmith.core.kernel import CutlassKernel, TileScheduler
from gemmsmith.core.operation import Grouping, Scaling
from gemmsmith.runtime.abi import ROW_GRADIENT_COLUMNS
from tuner.backends.cutlass import footprint, rules, wgmma

MAX_ACCUMULATORS_OF_BACKWARD_GATES = 128


def sums_accumulate_fast(kernel: CutlassKernel) -> str | None:
    # These kernels have no promotion of partial sums to FP32 registers.
    if kernel.operation.is_narrow_float and not kernel.fast_accumulation:
        return "our own kernels accumulate FP8 in the tensor core only"
    return None


def cluster_is_the_launchs(kernel: CutlassKernel) -> str | None:
    # The launch chooses the cluster: the thread blocks that share a tile along K.
    if kernel.cluster != (1, 1):
        return "our own kernels have no cluster along M and N"
    return None


def scheduler_suits_grouping(kernel: CutlassKernel) -> str | None:
    """A kernel iterates over groups if and only if the operation has groups of rows."""
    iterates = kernel.scheduler is TileScheduler.GROUPS
    if iterates is not (kernel.operation.grouping is Grouping.ROWS):
        return f"no kernels of grouping {kernel.operation.grouping} with {kernel.scheduler}"
    return None


def groups_are_stored_in_16_bits(kernel: CutlassKernel) -> str | None:
    """`GroupedKernel` stages D in blocks of 8×8 16-bit elements, and knows row factors only."""
    if kernel.scheduler is not TileScheduler.GROUPS:
        return None
    operation = kernel.operation
    scaling = Scaling.ROW if operation.is_narrow_float else Scaling.NONE
    if operation.d.bits != 16 or operation.scaling is not scaling or operation.a.bits > 16:
        return f"no kernels of {operation} iterate over groups"
    return None


def gates_have_whole_slabs(kernel: CutlassKernel) -> str | None:
    """A tile of `GatedRows` alternates between eight rows of the gate and eight of up."""
    columns = kernel.tile[0 if kernel.swapped else 1]
    if kernel.operation.epilogue.is_gated and columns % 16:
        return f"a tile of gate and up has a multiple of 16 columns, not {columns}"
    return None


def row_gradients_have_whole_slabs(kernel: CutlassKernel) -> str | None:
    """`BackwardGateStore` sums each token's 64 columns (`GS_ROW_GRADIENT_COLUMNS`) in one tile."""
    columns = kernel.tile[0 if kernel.swapped else 1]
    if kernel.operation.epilogue.backward and columns % ROW_GRADIENT_COLUMNS:
        return f"a tile of a backward gate has a multiple of 64 columns, not {columns}"
    return None


def gradients_of_gates_fit_registers(kernel: CutlassKernel) -> str | None:
    """`BackwardGateStore` beside 192 accumulators spills 1.7 kB, beside 128 nothing (nvcc 13.0)."""
    used = footprint.accumulator_registers(kernel)
    if kernel.operation.epilogue.backward and used > MAX_ACCUMULATORS_OF_BACKWARD_GATES:
        return f"{used} accumulator registers leave too few for a backward gate"
    return None


RULES = rules.by_name(
    rules.architecture_is_known,
    wgmma.architecture_has_wgmma,
    rules.operation_exists,
    rules.fast_accumulation_is_fp8,
    sums_accumulate_fast,
    rules.backend_matches_mainloop,
    rules.scheduler_matches_mainloop,
    rules.epilogue_matches_mainloop,
    scheduler_suits_grouping,
    groups_are_stored_in_16_bits,
    gates_have_whole_slabs,
    row_gradients_have_whole_slabs,
    gradients_of_gates_fit_registers,
    wgmma.tf32_is_k_major,
    wgmma.tile_m_is_whole_warpgroups,
    wgmma.tile_n_fits_instruction,
    wgmma.tile_k_fits_swizzle,
    cluster_is_the_launchs,
    wgmma.registers_suffice,
    wgmma.pipeline_is_deep_enough,
    rules.shared_memory_suffices,
    wgmma.k_major_b_fills_swizzle_atoms,
    wgmma.alignment_suits_mainloop,
    rules.fields_follow_name,
)
"""The rules that every kernel must satisfy, in order: cheap and frequently violated rules first."""
