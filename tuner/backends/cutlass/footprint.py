"""A kernel's use of a streaming multiprocessor: shared memory, pipeline depth, registers.

The arithmetic is CUTLASS's (`sm90_gmma_builder.inl::compute_stage_count_or_override`,
`epilogue/collective/builders/sm90_builder.inl`), restated so that a kernel can be refused without
compiling it; a test compares it with the compiler's numbers.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from gemmsmith.core.kernel import (
    TMA_MAINLOOPS,
    Backend,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.core.operation import Element
from gemmsmith.runtime.abi import ROW_GRADIENT_COLUMNS
from tuner.arch import architecture
from tuner.backends.cutlass.operation import scales_rows, stores_itself

WARPGROUP_THREADS = 128

_LINE = 128
"""Bytes that CUTLASS aligns the parts of shared storage to."""
_BARRIERS = 16
"""Bytes of a full and an empty transaction barrier, for each pipeline stage."""
_SCHEDULER_BARRIERS = 96
"""Bytes of the barriers that order the warpgroups, and of the tile scheduler's."""
_MOST_GROUPS_BYTES = 8 * 1024
"""Bytes of the ends of 1,024 groups, and of the numbers of tiles before them (`GroupedKernel`)."""
_GATED_LINE = 1024
"""Alignment of all parts of a gated kernel; its barriers fit into one such line."""
_GROUPS_BYTES = 1024
"""Bytes of the current group's TMA descriptors, and of the tiles that the scheduler has queued."""

_KEPT = 256
"""Answers that are kept: the rules ask several times about a kernel, one rule after the other."""


def consumer_warpgroups(kernel: CutlassKernel) -> int:
    """Warpgroups that share one output tile's accumulators."""
    if kernel.mainloop is MainloopSchedule.COOPERATIVE:
        return 2
    if kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        cooperative = kernel.scheduler is TileScheduler.PERSISTENT
        return 2 if cooperative and kernel.tile[0] >= 128 else 1
    return 1


def accumulator_registers(kernel: CutlassKernel) -> int:
    """32-bit registers per consumer thread that hold the output tile.

    Precise FP8 accumulation holds it twice: the tensor core's sums and the promoted sums.
    """
    m, n, _ = kernel.tile
    single = m * n // (WARPGROUP_THREADS * consumer_warpgroups(kernel))
    precise = kernel.operation.is_narrow_float and not kernel.fast_accumulation
    return single * 2 if precise and kernel.mainloop in TMA_MAINLOOPS else single


def stage_bytes(kernel: CutlassKernel) -> int:
    """Bytes of shared memory of one pipeline stage: a tile of A and a tile of B."""
    m, n, k = kernel.tile
    return (m * kernel.operation.a.bytes + n * kernel.operation.b.bytes) * k


@lru_cache(maxsize=_KEPT)
def epilogue_tile(kernel: CutlassKernel) -> tuple[int, int]:
    """The part of the output tile that one TMA store covers (CUTLASS's `EpilogueTileAuto`)."""
    m, n, _ = kernel.tile
    width = stored_bytes(kernel)
    if kernel.operation.epilogue.is_gated:  # `GateBox`: its columns divide a half of the tile
        return 64, gcd(128 // width, n // 2)
    if kernel.mainloop is MainloopSchedule.COOPERATIVE:
        return min(128, m), gcd(min(32, n), n)
    columns = 64 if width == 1 and n % 64 == 0 else 32
    return min(64, m), gcd(min(columns, n), n)


@lru_cache(maxsize=_KEPT)
def epilogue_bytes(kernel: CutlassKernel) -> int:
    """Bytes of the epilogue's staging buffers. C and D have one type, so they share buffers.

    Every further matrix that is loaded or stored has as many buffers of its own.
    """
    if kernel.epilogue is not EpilogueSchedule.TMA:
        return 0
    m, n = epilogue_tile(kernel)
    epilogue = kernel.operation.epilogue
    if epilogue.is_gated:  # two buffers for each warpgroup that stores
        return m * n * stored_bytes(kernel) * 2 * consumer_warpgroups(kernel)
    loaded = max(epilogue.reads, 1) if not kernel.operation.is_fused else epilogue.reads
    stored = epilogue.outputs - min(loaded, 1) + kernel.operation.symmetric
    stages = loaded * _epilogue_stages(kernel) + stored * min(_epilogue_parts(kernel), 2)
    return m * n * stored_bytes(kernel) * stages


def stored_bytes(kernel: CutlassKernel) -> int:
    """Bytes of an element that the kernel's epilogue stores: a partial sum, or an element of D."""
    partial = kernel.scheduler is TileScheduler.SPLIT_K
    return (kernel.operation.accumulator if partial else kernel.operation.d).bytes


def _epilogue_stages(kernel: CutlassKernel) -> int:
    if kernel.epilogue is not EpilogueSchedule.TMA:
        return 0
    parts = _epilogue_parts(kernel)
    if kernel.operation.is_fused and not kernel.operation.epilogue.reads:
        return min(parts, 4)  # nothing is loaded, so no stage is kept for the load of C
    return max(min(parts, 4), min(parts, 2) + 1)


def _epilogue_parts(kernel: CutlassKernel) -> int:
    m, n = epilogue_tile(kernel)
    return (kernel.tile[0] // m) * (kernel.tile[1] // n)


@lru_cache(maxsize=_KEPT)
def stages(kernel: CutlassKernel) -> int:
    """Pipeline depth: explicit, or computed as CUTLASS's automatic choice computes it."""
    if kernel.stages:
        return kernel.stages
    if kernel.backend is Backend.CUTLASS2X:
        return 2
    shared = architecture(kernel.arch).shared_bytes
    if kernel.backend is Backend.CUTE:
        other = _grouped_bytes(kernel) if kernel.scheduler is TileScheduler.GROUPS else 0
        return (shared - _LINE - other) // (stage_bytes(kernel) + _BARRIERS)
    if kernel.operation.epilogue.is_gated:
        return (shared - _GATED_LINE - epilogue_bytes(kernel)) // stage_bytes(kernel)
    per_stage = _round_up(stage_bytes(kernel), _LINE) + _BARRIERS
    carveout = _round_up(_epilogue_storage(kernel), _LINE)
    return (shared - carveout) // per_stage


@lru_cache(maxsize=_KEPT)
def shared_bytes(kernel: CutlassKernel) -> int:
    """Dynamic shared memory of one thread block, barriers and padding included.

    Never too little; exact for our own kernels, at most 384 bytes too much for CUTLASS's.
    """
    depth = stages(kernel)
    mainloop = depth * stage_bytes(kernel)
    if kernel.backend is Backend.CUTLASS2X:
        return mainloop  # the epilogue reuses it
    if kernel.scheduler is TileScheduler.GROUPS:
        return _round_up(mainloop + _grouped_bytes(kernel) + _BARRIERS * depth, _LINE)
    if kernel.backend is Backend.CUTE:
        # The tile's FP32 sums use the operands' memory (`cluster_split_k.hpp`).
        tile = max(mainloop, _sums_bytes(kernel))
        return _round_up(_round_up(tile, _LINE) + _BARRIERS * depth, _LINE)
    if kernel.operation.epilogue.is_gated:
        return _GATED_LINE + epilogue_bytes(kernel) + mainloop
    barriers = _BARRIERS * (depth + _epilogue_stages(kernel))
    if kernel.epilogue is not EpilogueSchedule.TMA:
        return mainloop + _round_up(barriers + _SCHEDULER_BARRIERS, _LINE) + _LINE
    align = _swizzle_bytes(kernel)
    buffers = _round_up(epilogue_bytes(kernel) + _fusion_bytes(kernel), align)
    if kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED:
        # Not persistent: the epilogue starts after the mainloop, and uses the same memory.
        return _round_up(max(mainloop, buffers) + barriers, align)
    groups = _GROUPS_BYTES if kernel.operation.is_grouped else 0
    return mainloop + buffers + _round_up(barriers + _SCHEDULER_BARRIERS, align) + groups


def _epilogue_storage(kernel: CutlassKernel) -> int:
    """`sizeof(Epilogue::SharedStorage)`: staging, the fusion's storage, barriers, padding."""
    if kernel.epilogue is not EpilogueSchedule.TMA:
        return 1
    align = _swizzle_bytes(kernel)
    buffers = _round_up(epilogue_bytes(kernel) + _fusion_bytes(kernel), align)
    return _round_up(buffers + _BARRIERS * _epilogue_stages(kernel), align)


def _fusion_bytes(kernel: CutlassKernel) -> int:
    """Bytes of the fusion's own shared storage.

    It holds a factor or a bias for each column of the tile, or the column sums of each warp of 16
    rows (`column_sums.hpp`). An empty fusion has one byte. A vector along the tile's rows, such as
    a swapped kernel's bias, is read from global memory.
    """
    epilogue = kernel.operation.epilogue
    if epilogue.backward and epilogue.backward.bias_gradient:
        rows, columns = epilogue_tile(kernel)
        return rows // 16 * columns * Element.F32.bytes
    if kernel.swapped:
        along = Element.F32.bytes * epilogue.has_row_scale
    else:
        along = kernel.operation.bias.bytes * (epilogue.has_bias + epilogue.has_column_scale)
    if along:
        return kernel.tile[1] * along
    stored = epilogue.matrices > epilogue.has_residual + bool(epilogue.backward)
    if stored or kernel.operation.symmetric:
        return 0  # buffers for stored matrices are counted with D's, and the fusion is not empty
    factors = scales_rows(kernel) and stores_itself(kernel)
    return kernel.tile[1] * Element.F32.bytes if factors else 1


def _swizzle_bytes(kernel: CutlassKernel) -> int:
    """Alignment of the epilogue's buffers: eight rows of the widest swizzle that divides a row.

    The transposed tiles of a symmetric D have the longer rows.
    """
    m, n = epilogue_tile(kernel)
    row = (m if kernel.swapped or kernel.operation.symmetric else n) * stored_bytes(kernel)
    return 8 * next(width for width in (128, 64, 32, 16) if row % width == 0)


def math_groups(kernel: CutlassKernel) -> int:
    """Math groups of a kernel that iterates over groups. Each stages its own tile."""
    return 2 if kernel.mainloop is MainloopSchedule.PINGPONG else 1


def _grouped_bytes(kernel: CutlassKernel) -> int:
    """Bytes of the staged tiles, with rows padded against bank conflicts (`kPitch`), and of the
    table of groups.
    """
    m, n, _ = kernel.tile
    tokens, columns = (n, m) if kernel.swapped else (m, n)
    buffers, epilogue, padding = math_groups(kernel), kernel.operation.epilogue, 8
    element = kernel.operation.d
    if epilogue.is_gated:  # gate, up and D alternate between two buffers
        columns, buffers = columns // 2, buffers * (2 if epilogue.stores_aux else 1)
    elif epilogue.backward:  # a part of the product (`kPart`)
        element = Element.F32
        if kernel.swapped:
            tokens, padding = gcd(tokens, 32), 4
        else:
            columns = ROW_GRADIENT_COLUMNS
    staged = buffers * tokens * (columns + padding) * element.bytes
    turns = _BARRIERS // 2 * math_groups(kernel)
    return _round_up(staged, 16) + turns + _MOST_GROUPS_BYTES


def _sums_bytes(kernel: CutlassKernel) -> int:
    """Bytes of a tile of FP32 sums, with rows padded against bank conflicts (`kPitch`)."""
    m, n, _ = kernel.tile
    rows, pitch = (n, m + 4) if kernel.swapped else (m, n + 8)
    return rows * pitch * Element.F32.bytes


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
