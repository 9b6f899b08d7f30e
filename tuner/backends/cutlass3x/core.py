"""The curated list of kernels for products without groups: a few hundred.

Chosen from measurements on an H200 (2026-11-20: the winning tile, cluster and schedule of 35 BF16
and 23 FP8 problems) and from the kernels that cuBLAS ran there.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.backends.cutlass.lines import (
    ALL,
    BOTH,
    M2,
    ONE,
    PAIRS,
    PLAIN,
    SWAPPED,
    KernelLine,
    expand_all,
    legal,
)
from tuner.backends.cutlass.operation import kernel
from tuner.backends.cutlass3x.rules import RULES

_WS = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID)
_PINGPONG = (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT)
_COOPERATIVE = (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT)
_STREAM_K = (MainloopSchedule.COOPERATIVE, TileScheduler.STREAM_K)
_WS_SPLIT = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.SPLIT_K)
_PINGPONG_SPLIT = (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K)
_COOPERATIVE_SPLIT = (MainloopSchedule.COOPERATIVE, TileScheduler.SPLIT_K)

_TMA = (
    # Few tokens, swapped: the weights' rows lie along M, 64 wide, and the tokens along N.
    # Winners at 16 and 64 tokens; cuBLAS's 64×8.
    KernelLine(
        schedule=_PINGPONG, m=64, ns=(8, 16, 32, 64), clusters=M2, swapped=SWAPPED, depth=256
    ),
    KernelLine(
        schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=M2, swapped=SWAPPED, precise=True
    ),
    KernelLine(
        schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=((4, 1),), swapped=SWAPPED, depth=256
    ),
    KernelLine(schedule=_WS, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_PINGPONG, m=64, ns=(48, 96, 128), clusters=M2, swapped=SWAPPED, depth=256),
    # Few tokens again, with more rows of the weights per block: cuBLAS's 128×16 … 512×16.
    KernelLine(schedule=_PINGPONG, m=128, ns=(8, 16, 32), clusters=M2, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(8, 16, 32), clusters=M2, swapped=SWAPPED),
    # Two thread blocks per SM: one block's prologue hides the other's epilogue.
    KernelLine(
        schedule=_WS, m=64, ns=(16, 32, 64), clusters=ONE, swapped=SWAPPED, depth=256, stages=4
    ),
    # Small outputs. Winners at 256 tokens and at 512×512×8192.
    KernelLine(schedule=_PINGPONG, m=64, ns=(64, 96), clusters=ONE, swapped=BOTH, precise=True),
    KernelLine(schedule=_PINGPONG, m=64, ns=(128,), clusters=ALL, swapped=BOTH, precise=True),
    KernelLine(schedule=_PINGPONG, m=64, ns=(192, 256), clusters=M2, swapped=BOTH),
    KernelLine(schedule=_PINGPONG, m=64, ns=(64, 128), clusters=ONE, swapped=BOTH, depth=256),
    # A single wave of tiles, one per block: a persistent kernel would only cost its set-up. 0.3 µs
    # faster than the cooperative kernel of the same tile at 1024×1792×768 and 256×7168×2048 (H200,
    # 2026-11-21).
    KernelLine(
        schedule=_WS, m=128, ns=(64, 96, 112, 128, 144, 160, 192), clusters=ONE, swapped=BOTH
    ),
    # Stores straight from registers: no wait for staging, and memory for another stage.
    KernelLine(
        schedule=_WS, m=64, ns=(8, 16), clusters=ONE, swapped=SWAPPED, depth=256, direct=True
    ),
    # Large outputs, ping-pong: epilogues overlap. Winners 128×144, 128×176, 128×192.
    KernelLine(
        schedule=_PINGPONG, m=128, ns=(64, 96, 128), clusters=ALL, swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_PINGPONG, m=128, ns=(144, 160, 176), clusters=ALL, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(192,), clusters=ALL, swapped=PLAIN),
    KernelLine(
        schedule=_PINGPONG, m=128, ns=(128, 192), clusters=M2, swapped=SWAPPED, precise=True
    ),
    KernelLine(
        schedule=_PINGPONG, m=128, ns=(64, 96, 144, 160, 176), clusters=((2, 1),), swapped=SWAPPED
    ),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 160), clusters=((4, 2),), swapped=PLAIN),
    # Large outputs, cooperative: the widest tiles. Winners 128×224, 128×256.
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(128,), clusters=ALL, swapped=PLAIN, precise=True),
    KernelLine(
        schedule=_COOPERATIVE, m=128, ns=(160,), clusters=((2, 1),), swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(208, 224), clusters=PAIRS, swapped=PLAIN),
    KernelLine(
        schedule=_COOPERATIVE, m=128, ns=(192, 256), clusters=ALL, swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(256,), clusters=ALL, swapped=SWAPPED),
    KernelLine(
        schedule=_COOPERATIVE,
        m=128,
        ns=(192, 224),
        clusters=((2, 1),),
        swapped=SWAPPED,
        precise=True,
    ),
    KernelLine(
        schedule=_COOPERATIVE,
        m=128,
        ns=(256,),
        clusters=((2, 2), (4, 1), (1, 4), (4, 2)),
        swapped=PLAIN,
    ),
    KernelLine(
        schedule=_COOPERATIVE,
        m=256,
        ns=(64, 96, 128),
        clusters=PAIRS,
        swapped=PLAIN,
        precise=True,
    ),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(80, 112, 160), clusters=((2, 1),), swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(64, 128), clusters=((2, 1),), swapped=SWAPPED),
    # Too few tiles to fill the GPU: split along K, in two kernels unless tiles are small. Small
    # tiles read much from L2, so cuBLAS runs them in clusters of 2×1 to 2×4. If K is long, rows are
    # far apart in memory, and deeper tiles read more of a DRAM page at once.
    KernelLine(
        schedule=_WS_SPLIT,
        m=64,
        ns=(32, 64, 128),
        clusters=((1, 1), (2, 1)),
        swapped=PLAIN,
        depth=256,
    ),
    KernelLine(
        schedule=_WS_SPLIT,
        m=64,
        ns=(64, 128),
        clusters=((2, 1), (1, 2)),
        swapped=PLAIN,
    ),
    KernelLine(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(128,),
        clusters=((2, 1),),
        swapped=PLAIN,
        depth=256,
    ),
    KernelLine(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(32, 64),
        clusters=((2, 2),),
        swapped=PLAIN,
    ),
    KernelLine(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(64, 128),
        clusters=ALL,
        swapped=PLAIN,
        precise=True,
    ),
    KernelLine(schedule=_PINGPONG_SPLIT, m=64, ns=(192, 256), clusters=ONE, swapped=BOTH),
    KernelLine(
        schedule=_PINGPONG_SPLIT,
        m=128,
        ns=(128, 192),
        clusters=((1, 1), (2, 1)),
        swapped=PLAIN,
        precise=True,
    ),
    KernelLine(
        schedule=_COOPERATIVE_SPLIT,
        m=128,
        ns=(128, 192, 256),
        clusters=((1, 1), (2, 1)),
        swapped=PLAIN,
        precise=True,
    ),
    KernelLine(schedule=_COOPERATIVE_SPLIT, m=256, ns=(128,), clusters=((2, 1),), swapped=BOTH),
    KernelLine(
        schedule=_STREAM_K, m=128, ns=(16, 32, 64), clusters=ONE, swapped=SWAPPED, depth=256
    ),
    KernelLine(
        schedule=_STREAM_K,
        m=128,
        ns=(64, 128),
        clusters=ONE,
        swapped=PLAIN,
        depth=256,
        precise=True,
    ),
    KernelLine(
        schedule=_STREAM_K, m=128, ns=(64, 128, 192), clusters=ONE, swapped=PLAIN, precise=True
    ),
    KernelLine(
        schedule=_STREAM_K, m=128, ns=(128, 256), clusters=((2, 1),), swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_STREAM_K, m=128, ns=(64, 128, 256), clusters=ONE, swapped=SWAPPED),
    KernelLine(
        schedule=_STREAM_K, m=256, ns=(128,), clusters=((2, 1),), swapped=PLAIN, precise=True
    ),
)

_NO_SMEM = (
    KernelLine(schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(
        schedule=_PINGPONG, m=64, ns=(64, 128, 256), clusters=ONE, swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=M2, swapped=PLAIN, precise=True),
    KernelLine(
        schedule=_COOPERATIVE, m=128, ns=(128, 256), clusters=M2, swapped=BOTH, precise=True
    ),
    KernelLine(
        schedule=_COOPERATIVE, m=256, ns=(128,), clusters=((2, 1),), swapped=PLAIN, precise=True
    ),
    KernelLine(schedule=_STREAM_K, m=128, ns=(64, 128), clusters=ONE, swapped=PLAIN, precise=True),
)

_PADDED = tuple(line for line in _NO_SMEM if line.schedule in (_PINGPONG, _COOPERATIVE))

_CPASYNC_TILES = ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
_CPASYNC_COOPERATIVE_TILES = ((128, 64), (128, 128), (128, 256))


@lru_cache(maxsize=16)
def tma_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    lines = _TMA if epilogue is EpilogueSchedule.TMA else _NO_SMEM
    return legal(expand_all(lines, operation, epilogue), RULES)


@lru_cache(maxsize=16)
def padded_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    return legal(expand_all(_PADDED, operation, epilogue, alignment=1), RULES)


@lru_cache(maxsize=32)
def cpasync_kernels(operation: Operation, alignment: int) -> tuple[CutlassKernel, ...]:
    """The curated kernels for rows aligned to 4 bytes or more, but not to 16."""
    depth = 128 // operation.a.bytes
    shapes = [(tile, TileScheduler.GRID) for tile in _CPASYNC_TILES]
    shapes += [(tile, TileScheduler.PERSISTENT) for tile in _CPASYNC_COOPERATIVE_TILES]
    return legal(
        (
            kernel(
                operation=operation,
                tile=(*tile, depth),
                mainloop=MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
                epilogue=EpilogueSchedule.NO_SMEM,
                scheduler=scheduler,
                alignment=alignment,
                swapped=swapped,
                name=False,
            )
            for tile, scheduler in shapes
            for swapped in BOTH
        ),
        RULES,
    )
