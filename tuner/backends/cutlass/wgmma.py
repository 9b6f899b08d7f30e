"""Rules of kernels around Hopper's `wgmma`, which CUTLASS's 3.x kernels and our own share."""

from __future__ import annotations

from gemmsmith.core.kernel import TMA_MAINLOOPS, CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Element, Operation
from tuner.arch import SM90
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import TMA_BYTES, operands

CPASYNC_MIN_BYTES = 4
"""`cp.async` copies at least this much at a time (`cp_async_min_alignment_bytes`)."""

MAX_ACCUMULATORS = 192
"""Accumulator registers per thread without spills; a consumer has 232 to 240 in all. Seen on nvcc
13.0: 256×256 cooperative and 128×256 ping-pong (256 of them) spill 4.8 kB; 192 spills nothing
that matters."""
MAX_ACCUMULATORS_CPASYNC = 128
"""The cp.async kernels do not move registers between warpgroups: 384 threads get 168 each."""


def tiles_k(operation: Operation) -> tuple[int, ...]:
    """Tile depths that there are: one or two 128-byte swizzle rows, and half of one of 8 bits."""
    rows = (64, 128, 256) if operation.a.bits == 8 else (128, 256)
    return tuple(row * 8 // operation.a.bits for row in rows)


def architecture_has_wgmma(kernel: CutlassKernel) -> str | None:
    """`wgmma` is Hopper's and nobody else's."""
    return None if kernel.arch == SM90.name else f"{kernel.arch} has no wgmma"


def tile_m_is_whole_warpgroups(kernel: CutlassKernel) -> str | None:
    """`wgmma` computes 64 rows, and cooperative kernels give each warpgroup its own."""
    rows = 128 if kernel.mainloop is MainloopSchedule.COOPERATIVE else 64
    if kernel.tile[0] < rows or kernel.tile[0] % rows or kernel.tile[0] > 256:
        return f"{kernel.mainloop} needs tile M a multiple of {rows} up to 256"
    return None


def tile_n_fits_instruction(kernel: CutlassKernel) -> str | None:
    """`wgmma` has N = 8, 16 … 256; of integers, beyond 32, multiples of 16 only."""
    n = kernel.tile[1]
    if kernel.operation.a.is_integer and n > 32 and n % 16:
        return f"tile N of integers must be a multiple of 16, not {n}"
    if n % 8 or not 8 <= n <= 256:
        return f"tile N must be a multiple of 8 up to 256, not {n}"
    return None


def tile_k_fits_swizzle(kernel: CutlassKernel) -> str | None:
    """Tile K fills whole 128-byte swizzle rows (64-byte ones for FP8 at K = 64)."""
    allowed = tiles_k(kernel.operation)
    return None if kernel.tile[2] in allowed else f"tile K must be one of {allowed}"


def tf32_is_k_major(kernel: CutlassKernel) -> str | None:
    """32-bit operands are read from shared memory K-major only (`gmma_ss_tag_to_major_A`)."""
    if kernel.operation.a is Element.TF32 and not kernel.layout.is_k_major:
        return f"wgmma reads TF32 operands K-major only, not {kernel.layout}"
    return None


def k_major_b_fills_swizzle_atoms(kernel: CutlassKernel) -> str | None:
    """K-major B: its stages must be addressable in the 128-byte swizzle.

    CuTe slices the pipeline dimension out of the swizzled layout, which it can express only if
    tile N rows are whole groups of 8-row atoms, as many as an element has bytes, or if all stages
    together are (static assertions "Stride" and "Shape Divisibility Condition").
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
    return None if used <= limit else f"{used} accumulator registers a thread exceed {limit}"


def pipeline_is_deep_enough(kernel: CutlassKernel) -> str | None:
    """At least two stages (static assertion)."""
    depth = footprint.stages(kernel)
    return None if depth >= 2 else f"a pipeline of {depth} stages is no pipeline"


def alignment_suits_mainloop(kernel: CutlassKernel) -> str | None:
    """TMA copies rows of 16 bytes' alignment, cp.async 4 to 16.

    A plain TMA kernel at alignment 1 copies what TMA cannot read (`padded.hpp`).
    """
    size = kernel.alignment_a * kernel.operation.a.bytes
    if kernel.mainloop in TMA_MAINLOOPS:
        can_pad = kernel.scheduler is TileScheduler.PERSISTENT
        legal = size == TMA_BYTES or (can_pad and kernel.alignment_a == 1)
    else:
        legal = size in (CPASYNC_MIN_BYTES, 8, 16)
    return None if legal else f"{kernel.mainloop} does not take alignment {kernel.alignment_a}"
