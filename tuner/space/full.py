"""Every legal sm90 kernel for one pair of element types and layout.

The product of all choices is filtered by the rules and by nothing else; it is what an exhaustive
search and a legality question need. Deterministic: the order is that of the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from gemmsmith.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.operation import Operation
from tuner.space import footprint
from tuner.space.legality import TMA_BYTES, choice_refusal
from tuner.space.operation import kernel, named

TILES_M = (64, 128, 256)
TILES_N = tuple(range(8, 257, 8))
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4))
EXPLICIT_STAGES = (2, 3, 4, 6, 8, 12)
"""Shallower pipelines than the automatic one: for plain warp-specialized kernels they let several
thread blocks share an SM; the persistent ones run one block per SM, and gain nothing by them."""

_TMA_SCHEDULES = (
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID),
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.STREAM_K),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.SPLIT_K),
    (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K),
    (MainloopSchedule.COOPERATIVE, TileScheduler.SPLIT_K),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K),
)
_PADDED_SCHEDULES = (
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT),
)
_SHARING_SM = (TileScheduler.GRID, TileScheduler.CLUSTER_SPLIT_K)


def tiles_k(operation: Operation) -> tuple[int, ...]:
    """Tile depths worth trying: one to four 128-byte swizzle rows."""
    return (64, 128, 256) if operation.a.bits == 8 else (64, 128)


@lru_cache(maxsize=16)
def tma_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    """Kernels with a TMA mainloop and the given epilogue."""
    return tuple(_legal(_tma(_TMA_SCHEDULES, operation, epilogue, TMA_BYTES // operation.a.bytes)))


@lru_cache(maxsize=16)
def padded_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    """Kernels with a TMA mainloop that copy operands which TMA cannot read."""
    return tuple(_legal(_tma(_PADDED_SCHEDULES, operation, epilogue, 1)))


def _tma(
    schedules: Sequence[tuple[MainloopSchedule, TileScheduler]],
    operation: Operation,
    wanted_epilogue: EpilogueSchedule,
    alignment: int,
) -> Iterator[CutlassKernel]:
    accumulation = (True, False) if operation.is_narrow_float else (False,)
    choices = product(
        schedules, TILES_M, TILES_N, tiles_k(operation), CLUSTERS, (False, True), accumulation
    )
    for (mainloop, scheduler), m, n, k, cluster, swapped, fast in choices:
        in_cluster = scheduler is TileScheduler.CLUSTER_SPLIT_K
        epilogue = EpilogueSchedule.NO_SMEM if in_cluster else wanted_epilogue
        automatic = kernel(
            operation=operation,
            tile=(m, n, k),
            cluster=cluster,
            mainloop=mainloop,
            epilogue=epilogue,
            scheduler=scheduler,
            alignment=alignment,
            swapped=swapped,
            fast_accumulation=fast,
            name=False,
        )
        yield automatic
        if scheduler not in _SHARING_SM or choice_refusal(automatic):
            continue
        deepest = footprint.stages(automatic)
        for stages in EXPLICIT_STAGES:
            if stages < deepest:
                yield kernel(
                    operation=operation,
                    tile=(m, n, k),
                    cluster=cluster,
                    stages=stages,
                    mainloop=mainloop,
                    epilogue=epilogue,
                    scheduler=scheduler,
                    alignment=alignment,
                    swapped=swapped,
                    fast_accumulation=fast,
                    name=False,
                )


@lru_cache(maxsize=32)
def cpasync_kernels(operation: Operation, alignment: int) -> tuple[CutlassKernel, ...]:
    """Kernels whose producer warps copy with cp.async: rows aligned to 4 bytes and more."""
    return tuple(
        _legal(
            kernel(
                operation=operation,
                tile=(m, n, k),
                mainloop=MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
                epilogue=EpilogueSchedule.NO_SMEM,
                scheduler=scheduler,
                alignment=alignment,
                swapped=swapped,
                name=False,
            )
            for scheduler, m, n, k, swapped in product(
                (TileScheduler.GRID, TileScheduler.PERSISTENT),
                TILES_M,
                TILES_N,
                tiles_k(operation)[:2],
                (False, True),
            )
        )
    )


@lru_cache(maxsize=16)
def multistage_kernels(operation: Operation) -> tuple[CutlassKernel, ...]:
    """CUTLASS 2.x kernels that take any alignment: the last resort."""
    depth = 512 // operation.a.bits
    return tuple(
        _legal(
            kernel(
                operation=operation,
                tile=(m, n, depth),
                stages=2,
                mainloop=MainloopSchedule.MULTISTAGE,
                epilogue=EpilogueSchedule.THREADBLOCK,
                scheduler=TileScheduler.GRID,
                alignment=1,
                name=False,
            )
            for m, n in ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
        )
    )


def _legal(kernels: Iterator[CutlassKernel]) -> Iterator[CutlassKernel]:
    return (named(each) for each in kernels if choice_refusal(each) is None)
