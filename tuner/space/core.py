"""The curated list: the few hundred kernels among which winners have been found.

Chosen from measurements on an H200 (2026-11-20: the winning tile, cluster and schedule of 35 BF16
and 23 FP8 problems) and from the kernels cuBLAS was seen to run there. In bytes, not elements, one
list serves both widths: `depth` 128 is K = 64 for 16-bit types and 128 for FP8.

A line that a rule refuses for some types or layout is left out there, so the list states intent
and the rules stay the only judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from gemmsmith.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.operation import Operation
from tuner.space.legality import TMA_BYTES, choice_refusal
from tuner.space.operation import kernel, named

_WS = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID)
_PINGPONG = (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT)
_COOPERATIVE = (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT)
_STREAM_K = (MainloopSchedule.COOPERATIVE, TileScheduler.STREAM_K)
_WS_SPLIT = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.SPLIT_K)
_PINGPONG_SPLIT = (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K)
_COOPERATIVE_SPLIT = (MainloopSchedule.COOPERATIVE, TileScheduler.SPLIT_K)
_CLUSTER_SPLIT = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K)

_ONE = ((1, 1),)
_M2 = ((1, 1), (2, 1))
_PAIRS = ((2, 1), (1, 2))
_ALL = ((1, 1), (2, 1), (1, 2))
_PLAIN = (False,)
_SWAPPED = (True,)
_BOTH = (False, True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """Kernels that differ in tile N, cluster and orientation only. `depth`: tile K in bytes."""

    schedule: tuple[MainloopSchedule, TileScheduler]
    m: int
    ns: tuple[int, ...]
    clusters: tuple[tuple[int, int], ...]
    swapped: tuple[bool, ...]
    depth: int = 128
    stages: int = 0
    precise: bool = False  # FP8: offered with precise accumulation as well
    direct: bool = False  # stores from registers even where TMA could store


_TMA = (
    # Few tokens, swapped: the weights' rows run along the 64-wide M, the tokens along N.
    # Winners at 16 and 64 tokens; cuBLAS's 64×8.
    _Line(schedule=_PINGPONG, m=64, ns=(8, 16, 32, 64), clusters=_M2, swapped=_SWAPPED, depth=256),
    _Line(schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=_M2, swapped=_SWAPPED, precise=True),
    _Line(
        schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=((4, 1),), swapped=_SWAPPED, depth=256
    ),
    _Line(schedule=_WS, m=64, ns=(8, 16, 32, 64), clusters=_ONE, swapped=_SWAPPED, depth=256),
    _Line(schedule=_PINGPONG, m=64, ns=(48, 96, 128), clusters=_M2, swapped=_SWAPPED, depth=256),
    # More rows of the weights per block for the few tokens they meet: cuBLAS's 128×16 … 512×16.
    _Line(schedule=_PINGPONG, m=128, ns=(8, 16, 32), clusters=_M2, swapped=_SWAPPED),
    _Line(schedule=_COOPERATIVE, m=256, ns=(8, 16, 32), clusters=_M2, swapped=_SWAPPED),
    # Two thread blocks per SM: one block's prologue hides the other's epilogue.
    _Line(
        schedule=_WS, m=64, ns=(16, 32, 64), clusters=_ONE, swapped=_SWAPPED, depth=256, stages=4
    ),
    # Small outputs. Winners at 256 tokens and at 512×512×8192.
    _Line(schedule=_PINGPONG, m=64, ns=(64, 96), clusters=_ONE, swapped=_BOTH, precise=True),
    _Line(schedule=_PINGPONG, m=64, ns=(128,), clusters=_ALL, swapped=_BOTH, precise=True),
    _Line(schedule=_PINGPONG, m=64, ns=(192, 256), clusters=_M2, swapped=_BOTH),
    _Line(schedule=_PINGPONG, m=64, ns=(64, 128), clusters=_ONE, swapped=_BOTH, depth=256),
    # One tile per block, a wave of them: nothing persistent to set up. 0.3 µs less than the
    # cooperative kernel of the same tile at 1024×1792×768 and 256×7168×2048 (H200, 2026-11-21).
    _Line(schedule=_WS, m=128, ns=(64, 96, 112, 128, 144, 160, 192), clusters=_ONE, swapped=_BOTH),
    # Stores straight from registers: no staging to wait for, and room for another stage.
    _Line(schedule=_WS, m=64, ns=(8, 16), clusters=_ONE, swapped=_SWAPPED, depth=256, direct=True),
    # Large outputs, ping-pong: epilogues overlap. Winners 128×144, 128×176, 128×192.
    _Line(schedule=_PINGPONG, m=128, ns=(64, 96, 128), clusters=_ALL, swapped=_PLAIN, precise=True),
    _Line(schedule=_PINGPONG, m=128, ns=(144, 160, 176), clusters=_ALL, swapped=_PLAIN),
    _Line(schedule=_PINGPONG, m=128, ns=(192,), clusters=_ALL, swapped=_PLAIN),
    _Line(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=_M2, swapped=_SWAPPED, precise=True),
    _Line(
        schedule=_PINGPONG, m=128, ns=(64, 96, 144, 160, 176), clusters=((2, 1),), swapped=_SWAPPED
    ),
    _Line(schedule=_PINGPONG, m=128, ns=(128, 160), clusters=((4, 2),), swapped=_PLAIN),
    # Large outputs, cooperative: the widest tiles. Winners 128×224, 128×256.
    _Line(schedule=_COOPERATIVE, m=128, ns=(128,), clusters=_ALL, swapped=_PLAIN, precise=True),
    _Line(
        schedule=_COOPERATIVE, m=128, ns=(160,), clusters=((2, 1),), swapped=_PLAIN, precise=True
    ),
    _Line(schedule=_COOPERATIVE, m=128, ns=(208, 224), clusters=_PAIRS, swapped=_PLAIN),
    _Line(schedule=_COOPERATIVE, m=128, ns=(192, 256), clusters=_ALL, swapped=_PLAIN, precise=True),
    _Line(schedule=_COOPERATIVE, m=128, ns=(256,), clusters=_ALL, swapped=_SWAPPED),
    _Line(
        schedule=_COOPERATIVE,
        m=128,
        ns=(192, 224),
        clusters=((2, 1),),
        swapped=_SWAPPED,
        precise=True,
    ),
    _Line(
        schedule=_COOPERATIVE,
        m=128,
        ns=(256,),
        clusters=((2, 2), (4, 1), (1, 4), (4, 2)),
        swapped=_PLAIN,
    ),
    _Line(
        schedule=_COOPERATIVE,
        m=256,
        ns=(64, 96, 128),
        clusters=_PAIRS,
        swapped=_PLAIN,
        precise=True,
    ),
    _Line(schedule=_COOPERATIVE, m=256, ns=(80, 112, 160), clusters=((2, 1),), swapped=_PLAIN),
    _Line(schedule=_COOPERATIVE, m=256, ns=(64, 128), clusters=((2, 1),), swapped=_SWAPPED),
    # Too few tiles to fill the GPU: split along K, within a cluster while tiles are small.
    _Line(
        schedule=_CLUSTER_SPLIT, m=64, ns=(8, 16, 32), clusters=_ONE, swapped=_SWAPPED, depth=256
    ),
    _Line(schedule=_CLUSTER_SPLIT, m=64, ns=(32,), clusters=_ONE, swapped=_PLAIN, depth=256),
    _Line(schedule=_CLUSTER_SPLIT, m=64, ns=(64, 96, 128), clusters=_ONE, swapped=_BOTH, depth=256),
    # … with two thread blocks per SM, …
    _Line(
        schedule=_CLUSTER_SPLIT,
        m=64,
        ns=(16, 32, 64),
        clusters=_ONE,
        swapped=_SWAPPED,
        depth=256,
        stages=4,
    ),
    _Line(schedule=_CLUSTER_SPLIT, m=128, ns=(64, 128), clusters=_ONE, swapped=_PLAIN, depth=256),
    # … and otherwise in two kernels.
    # Small tiles read much from L2: cuBLAS's run in clusters of 2×1 to 2×4. With rows of a long K
    # far apart in memory, deeper tiles read more of a DRAM page at a time.
    _Line(
        schedule=_WS_SPLIT,
        m=64,
        ns=(32, 64, 128),
        clusters=((1, 1), (2, 1)),
        swapped=_PLAIN,
        depth=256,
    ),
    _Line(
        schedule=_WS_SPLIT,
        m=64,
        ns=(64, 128),
        clusters=((2, 1), (1, 2)),
        swapped=_PLAIN,
    ),
    _Line(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(128,),
        clusters=((2, 1),),
        swapped=_PLAIN,
        depth=256,
    ),
    _Line(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(32, 64),
        clusters=((2, 2),),
        swapped=_PLAIN,
    ),
    _Line(
        schedule=_PINGPONG_SPLIT,
        m=64,
        ns=(64, 128),
        clusters=_ALL,
        swapped=_PLAIN,
        precise=True,
    ),
    _Line(schedule=_PINGPONG_SPLIT, m=64, ns=(192, 256), clusters=_ONE, swapped=_BOTH),
    _Line(
        schedule=_PINGPONG_SPLIT,
        m=128,
        ns=(128, 192),
        clusters=((1, 1), (2, 1)),
        swapped=_PLAIN,
        precise=True,
    ),
    _Line(
        schedule=_COOPERATIVE_SPLIT,
        m=128,
        ns=(128, 192, 256),
        clusters=((1, 1), (2, 1)),
        swapped=_PLAIN,
        precise=True,
    ),
    _Line(schedule=_COOPERATIVE_SPLIT, m=256, ns=(128,), clusters=((2, 1),), swapped=_BOTH),
    _Line(schedule=_STREAM_K, m=128, ns=(16, 32, 64), clusters=_ONE, swapped=_SWAPPED, depth=256),
    _Line(
        schedule=_STREAM_K,
        m=128,
        ns=(64, 128),
        clusters=_ONE,
        swapped=_PLAIN,
        depth=256,
        precise=True,
    ),
    _Line(
        schedule=_STREAM_K, m=128, ns=(64, 128, 192), clusters=_ONE, swapped=_PLAIN, precise=True
    ),
    _Line(
        schedule=_STREAM_K, m=128, ns=(128, 256), clusters=((2, 1),), swapped=_PLAIN, precise=True
    ),
    _Line(schedule=_STREAM_K, m=128, ns=(64, 128, 256), clusters=_ONE, swapped=_SWAPPED),
    _Line(schedule=_STREAM_K, m=256, ns=(128,), clusters=((2, 1),), swapped=_PLAIN, precise=True),
)

_NO_SMEM = (
    _Line(schedule=_PINGPONG, m=64, ns=(16, 32, 64), clusters=_ONE, swapped=_SWAPPED, depth=256),
    _Line(schedule=_PINGPONG, m=64, ns=(64, 128, 256), clusters=_ONE, swapped=_PLAIN, precise=True),
    _Line(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=_M2, swapped=_PLAIN, precise=True),
    _Line(schedule=_COOPERATIVE, m=128, ns=(128, 256), clusters=_M2, swapped=_BOTH, precise=True),
    _Line(
        schedule=_COOPERATIVE, m=256, ns=(128,), clusters=((2, 1),), swapped=_PLAIN, precise=True
    ),
    _Line(schedule=_STREAM_K, m=128, ns=(64, 128), clusters=_ONE, swapped=_PLAIN, precise=True),
    _Line(schedule=_CLUSTER_SPLIT, m=64, ns=(16, 32, 64), clusters=_ONE, swapped=_BOTH, depth=256),
)

_PADDED = tuple(line for line in _NO_SMEM if line.schedule in (_PINGPONG, _COOPERATIVE))

_CPASYNC_TILES = ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
_CPASYNC_COOPERATIVE_TILES = ((128, 64), (128, 128), (128, 256))


@lru_cache(maxsize=16)
def tma_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    """The curated kernels with a TMA mainloop and the given epilogue."""
    lines = _TMA if epilogue is EpilogueSchedule.TMA else _NO_SMEM
    return tuple(_legal(each for line in lines for each in _expand(line, operation, epilogue)))


@lru_cache(maxsize=16)
def padded_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    """The curated kernels that copy operands which TMA cannot read."""
    lines = (each for line in _PADDED for each in _expand(line, operation, epilogue, 1))
    return tuple(_legal(lines))


def _expand(
    line: _Line,
    operation: Operation,
    epilogue: EpilogueSchedule,
    alignment: int | None = None,
) -> Iterator[CutlassKernel]:
    mainloop, scheduler = line.schedule
    if line.direct or scheduler is TileScheduler.CLUSTER_SPLIT_K:
        epilogue = EpilogueSchedule.NO_SMEM
    accumulation = (True, False) if line.precise else (True,)
    for n in line.ns:
        for cluster in line.clusters:
            for swapped in line.swapped:
                for fast in accumulation if operation.is_narrow_float else (False,):
                    yield kernel(
                        operation=operation,
                        tile=(line.m, n, line.depth // operation.a.bytes),
                        cluster=cluster,
                        stages=line.stages,
                        mainloop=mainloop,
                        epilogue=epilogue,
                        scheduler=scheduler,
                        alignment=alignment or TMA_BYTES // operation.a.bytes,
                        swapped=swapped,
                        fast_accumulation=fast,
                        name=False,
                    )


@lru_cache(maxsize=32)
def cpasync_kernels(operation: Operation, alignment: int) -> tuple[CutlassKernel, ...]:
    """The curated kernels for rows aligned to 4 bytes or more, but not to 16."""
    depth = 128 // operation.a.bytes
    shapes = [(tile, TileScheduler.GRID) for tile in _CPASYNC_TILES]
    shapes += [(tile, TileScheduler.PERSISTENT) for tile in _CPASYNC_COOPERATIVE_TILES]
    return tuple(
        _legal(
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
            for swapped in _BOTH
        )
    )


def _legal(kernels: Iterator[CutlassKernel]) -> list[CutlassKernel]:
    """Drop what a rule refuses, and what two lines both name."""
    legal = (named(each) for each in kernels if choice_refusal(each) is None)
    return list({each.name: each for each in legal}.values())
