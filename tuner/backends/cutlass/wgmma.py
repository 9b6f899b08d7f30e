"""Legality rules of kernels that use Hopper's `wgmma`: CUTLASS 3.x's and this project's own."""

from __future__ import annotations

from gemmsmith.core.kernel import TMA_MAINLOOPS, CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Element, Operation
from tuner.arch import SM90
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import TMA_BYTES, operands

CPASYNC_MIN_BYTES = 4
"""The least bytes that one `cp.async` copies (`cp_async_min_alignment_bytes`)."""

MAX_ACCUMULATORS = 192
"""Accumulator registers per thread that do not spill; a consumer has 232 to 240 registers. With
nvcc 13.0, kernels with 256 (256×256 cooperative, 128×256 ping-pong) spill 4.8 kB; those with 192
spill next to nothing."""
MAX_ACCUMULATORS_CPASYNC = 128
"""The same for `cp.async` kernels, which do not move registers between warpgroups: each of their
384 threads has 168."""


def tiles_k(operation: Operation) -> tuple[int, ...]:
    """All legal depths of a tile: one or two 128-byte swizzle rows; half a row for 8-bit types."""
    rows = (64, 128, 256) if operation.a.bits == 8 else (128, 256)
    return tuple(row * 8 // operation.a.bits for row in rows)


def architecture_has_wgmma(kernel: CutlassKernel) -> str | None:
    return None if kernel.arch == SM90.name else f"{kernel.arch} has no wgmma"


def tile_m_is_whole_warpgroups(kernel: CutlassKernel) -> str | None:
    """`wgmma` computes 64 rows; the two warpgroups of a cooperative kernel have 64 rows each."""
    rows = 128 if kernel.mainloop is MainloopSchedule.COOPERATIVE else 64
    if kernel.tile[0] < rows or kernel.tile[0] % rows or kernel.tile[0] > 256:
        return f"{kernel.mainloop} needs tile M a multiple of {rows} up to 256"
    return None


def tile_n_fits_instruction(kernel: CutlassKernel) -> str | None:
    """`wgmma` has N = 8, 16 … 256; for integers, above 32, multiples of 16 only."""
    n = kernel.tile[1]
    if kernel.operation.a.is_integer and n > 32 and n % 16:
        return f"tile N of integers must be a multiple of 16, not {n}"
    if n % 8 or not 8 <= n <= 256:
        return f"tile N must be a multiple of 8 up to 256, not {n}"
    return None


def tile_k_fits_swizzle(kernel: CutlassKernel) -> str | None:
    # Whole 128-byte swizzle rows; 64-byte rows for FP8 with K = 64.
    allowed = tiles_k(kernel.operation)
    return None if kernel.tile[2] in allowed else f"tile K must be one of {allowed}"


def tf32_is_k_major(kernel: CutlassKernel) -> str | None:
    # `gmma_ss_tag_to_major_A`: 32-bit operands are read from shared memory K-major only.
    if kernel.operation.a is Element.TF32 and not kernel.layout.is_k_major:
        return f"wgmma reads TF32 operands K-major only, not {kernel.layout}"
    return None


def k_major_b_fills_swizzle_atoms(kernel: CutlassKernel) -> str | None:
    """The stages of a K-major B must be addressable in the 128-byte swizzle.

    CuTe slices the pipeline dimension out of the swizzled layout. It can do so only if the rows of
    tile N, or of all stages together, are whole groups of 8-row atoms; a group has as many atoms as
    an element has bytes (static assertions "Stride" and "Shape Divisibility Condition").
    """
    if operands(kernel.operation, swapped=kernel.swapped).b_row_major:
        return None
    n, k = kernel.tile[1], kernel.tile[2]
    group = kernel.operation.a.bytes
    rows = 8 * group
    atoms = n // 8 * (k * kernel.operation.a.bits // 1024) * footprint.stages(kernel)
    if n % rows == 0 or (rows % n == 0 and atoms % group == 0):
        return None
    return f"tile N = {n} leaves part of {group} swizzle atoms in K-major B"


def registers_suffice(kernel: CutlassKernel) -> str | None:
    """The accumulators fit the register file without spilling (hardware limit)."""
    cpasync = kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED
    limit = MAX_ACCUMULATORS_CPASYNC if cpasync else MAX_ACCUMULATORS
    used = footprint.accumulator_registers(kernel)
    return None if used <= limit else f"{used} accumulator registers per thread exceed {limit}"


def pipeline_is_deep_enough(kernel: CutlassKernel) -> str | None:
    # A static assertion of CUTLASS.
    depth = footprint.stages(kernel)
    return None if depth >= 2 else f"a pipeline needs 2 stages, not {depth}"


def alignment_suits_mainloop(kernel: CutlassKernel) -> str | None:
    """TMA needs rows aligned to 16 bytes, `cp.async` to 4, 8 or 16.

    A plain TMA kernel with alignment 1 first copies operands that TMA cannot read (`padded.hpp`).
    """
    size = kernel.alignment_a * kernel.operation.a.bytes
    if kernel.mainloop in TMA_MAINLOOPS:
        can_pad = kernel.scheduler is TileScheduler.PERSISTENT
        legal = size == TMA_BYTES or (can_pad and kernel.alignment_a == 1)
    else:
        legal = size in (CPASYNC_MIN_BYTES, 8, 16)
    return None if legal else f"{kernel.mainloop} does not take alignment {kernel.alignment_a}"
