"""The legality rules of CUTLASS 3.x kernels."""

from __future__ import annotations

from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Element
from tuner.backends.cutlass import footprint, rules, wgmma
from tuner.backends.cutlass.operation import TMA_BYTES, operands, scales_rows

MMA_PROMOTION_INTERVAL = 4
"""Default `mma_promotion_interval` of precise FP8 kernels, in `wgmma` instructions of K = 32."""

SWIZZLE_BYTES = 128
"""Bytes of a row of the widest swizzle atom."""

MAX_ACCUMULATORS_BESIDE_ACTIVATION = 96
"""Accumulator registers of swapped kernels whose activation has an exponential. With 128 and 192,
four of five kernels spill 12 to 152 bytes; with 96 none spills. Kernels that are not swapped do not
spill with 192 (nvcc 13.0.88, 2026-11-23)."""

MAX_ACCUMULATORS_BESIDE_GATES = 176
"""Accumulator registers of backward epilogues that read gate and up and store three outputs. 192
spill 32 bytes, 176 none; epilogues that store two outputs do not spill with 192 (as above)."""


def promotion_interval_divides(kernel: CutlassKernel) -> str | None:
    """Precise FP8 kernels promote their sums after whole mainloop iterations (`can_implement`)."""
    precise = kernel.operation.is_narrow_float and not kernel.fast_accumulation
    if precise and kernel.mainloop in TMA_MAINLOOPS and kernel.tile[2] > 128:
        return f"tile K of precise FP8 must be at most {32 * MMA_PROMOTION_INTERVAL}"
    return None


def cpasync_threads_cover_tile(kernel: CutlassKernel) -> str | None:
    """The producer's threads divide tiles of A and B evenly (`make_simt_gmem_tiled_copy`)."""
    if kernel.mainloop is not MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        return None
    types = operands(kernel.operation, swapped=kernel.swapped)
    warpgroups = 2 if kernel.scheduler is TileScheduler.GRID else 1
    threads = warpgroups * footprint.WARPGROUP_THREADS
    m, n, k = kernel.tile
    for name, extent, k_major in (("A", m, types.a_row_major), ("B", n, not types.b_row_major)):
        major, minor = (k, extent) if k_major else (extent, k)
        along = min(threads, major // kernel.alignment_a)
        if major % kernel.alignment_a or threads % along or minor % (threads // along):
            return f"{threads} producer threads do not tile operand {name} evenly"
    return None


def cpasync_copies_16_bit_and_fp8(kernel: CutlassKernel) -> str | None:
    """Integers and TF32 that TMA cannot read are copied first instead (`padded.hpp`)."""
    cpasync = kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED
    if cpasync and kernel.operation.a in (Element.S8, Element.TF32):
        return f"no cp.async kernels of {kernel.operation.a}"
    return None


def row_scales_leave_by_tma(kernel: CutlassKernel) -> str | None:
    # CUTLASS has visitor trees, which apply the factors, for the TMA epilogue only.
    if scales_rows(kernel) and kernel.epilogue is not EpilogueSchedule.TMA:
        return "factors per row and column need the TMA epilogue"
    return None


def grouped_kernels_are_pointer_arrays(kernel: CutlassKernel) -> str | None:
    """CUTLASS's pointer-array kernels are ping-pong or cooperative, and store by TMA.

    Their epilogue cannot apply factors of tokens.
    """
    if not kernel.operation.is_grouped:
        return None
    if reason := _not_whole_tiles_by_tma(kernel, "grouped"):
        return reason
    return "no grouped kernels with factors" if kernel.operation.is_scaled else None


def fused_kernels_leave_by_tma(kernel: CutlassKernel) -> str | None:
    # The visitor tree needs the TMA epilogue, and complete sums of a tile.
    return _not_whole_tiles_by_tma(kernel, "fused") if kernel.operation.is_fused else None


def symmetric_kernels_leave_by_tma(kernel: CutlassKernel) -> str | None:
    """The visitor tree that stores a tile twice needs the TMA epilogue (`symmetric.hpp`)."""
    if not kernel.operation.symmetric:
        return None
    if kernel.swapped:
        return "a symmetric result is its own transpose"
    return _not_whole_tiles_by_tma(kernel, "symmetric")


def _not_whole_tiles_by_tma(kernel: CutlassKernel, kind: str) -> str | None:
    """None if it is a persistent kernel that loads and stores by TMA, else the reason."""
    if kernel.mainloop not in (MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE):
        return f"no {kind} kernels with {kernel.mainloop}"
    if kernel.scheduler is not TileScheduler.PERSISTENT:
        return f"{kind} kernels do not take the {kernel.scheduler} scheduler"
    if kernel.epilogue is not EpilogueSchedule.TMA or kernel.alignment_a == 1:
        return f"{kind} kernels load and store by TMA"
    return None


def tma_stores_whole_vectors(kernel: CutlassKernel) -> str | None:
    """A row of TMA's box, the part of D that one TMA store writes, is a multiple of 16 bytes."""
    if kernel.epilogue is not EpilogueSchedule.TMA:
        return None
    m, n = footprint.epilogue_tile(kernel)
    row = (m if kernel.swapped else n) * footprint.stored_bytes(kernel)
    return f"TMA does not store rows of {row} bytes" if row % TMA_BYTES else None


def activation_leaves_registers(kernel: CutlassKernel) -> str | None:
    """An activation needs registers beside the accumulators, more if the kernel is swapped."""
    activation = kernel.operation.epilogue.activation
    heavy = activation is not None and activation.approximations > 1
    used = footprint.accumulator_registers(kernel)
    if heavy and kernel.swapped and used > MAX_ACCUMULATORS_BESIDE_ACTIVATION:
        return f"{used} accumulator registers per thread leave too few for the activation"
    return None


def gated_tile_is_two_halves(kernel: CutlassKernel) -> str | None:
    """Gate and up are halves of tile N, with K of one row of a swizzle atom (`gated3x.hpp`).

    A half consists of whole boxes of 16 columns, and of whole atoms of 8 rows for every block of
    the cluster that loads a share of it.
    """
    if not kernel.operation.epilogue.is_gated:
        return None
    _, n, k = kernel.tile
    if kernel.swapped:
        return "gate and up lie along the kernel's N"
    if k * kernel.operation.a.bytes != SWIZZLE_BYTES:
        return f"gated kernels have tile K of {SWIZZLE_BYTES} bytes"
    share = max(32, 16 * kernel.cluster[0])
    return f"tile N of gated kernels must be a multiple of {share}" if n % share else None


def gates_leave_registers(kernel: CutlassKernel) -> str | None:
    """Gate, up and all three outputs need registers beside the accumulators."""
    backward = kernel.operation.epilogue.backward
    used = footprint.accumulator_registers(kernel)
    three = backward is not None and backward.gated and backward.activated
    if three and used > MAX_ACCUMULATORS_BESIDE_GATES:
        return f"{used} accumulator registers per thread leave too few for gate, up and outputs"
    return None


def backward_kernels_are_not_swapped(kernel: CutlassKernel) -> str | None:
    # Swapped kernels are for few tokens, and a backward pass has many.
    if kernel.operation.epilogue.backward and kernel.swapped:
        return "backward epilogues are not swapped"
    return None


RULES = rules.by_name(
    rules.architecture_is_known,
    wgmma.architecture_has_wgmma,
    rules.operation_exists,
    rules.fast_accumulation_is_fp8,
    rules.backend_matches_mainloop,
    rules.scheduler_matches_mainloop,
    rules.epilogue_matches_mainloop,
    grouped_kernels_are_pointer_arrays,
    fused_kernels_leave_by_tma,
    symmetric_kernels_leave_by_tma,
    gated_tile_is_two_halves,
    backward_kernels_are_not_swapped,
    wgmma.tf32_is_k_major,
    cpasync_copies_16_bit_and_fp8,
    row_scales_leave_by_tma,
    wgmma.tile_m_is_whole_warpgroups,
    wgmma.tile_n_fits_instruction,
    wgmma.tile_k_fits_swizzle,
    tma_stores_whole_vectors,
    promotion_interval_divides,
    rules.cluster_is_portable,
    wgmma.registers_suffice,
    activation_leaves_registers,
    gates_leave_registers,
    wgmma.pipeline_is_deep_enough,
    rules.shared_memory_suffices,
    wgmma.k_major_b_fills_swizzle_atoms,
    wgmma.alignment_suits_mainloop,
    cpasync_threads_cover_tile,
    rules.fields_follow_name,
)
"""The rules that every kernel must satisfy, in order: cheap and frequently violated rules first."""
