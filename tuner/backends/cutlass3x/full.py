"""Every legal kernel of CUTLASS 3.x for an operation: all choices that the rules allow."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.backends.cutlass.lines import legal
from tuner.backends.cutlass.operation import kernel, tma_alignment
from tuner.backends.cutlass.products import TILES_M, TILES_N, tma_products
from tuner.backends.cutlass.wgmma import tiles_k
from tuner.backends.cutlass3x.rules import RULES

_TMA_SCHEDULES = (
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID),
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.STREAM_K),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.SPLIT_K),
    (MainloopSchedule.PINGPONG, TileScheduler.SPLIT_K),
    (MainloopSchedule.COOPERATIVE, TileScheduler.SPLIT_K),
)
_PERSISTENT = (
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT),
)


@lru_cache(maxsize=16)
def tma_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    alignment = tma_alignment(operation)
    return legal(tma_products(_TMA_SCHEDULES, operation, epilogue, alignment, RULES), RULES)


@lru_cache(maxsize=32)
def persistent_kernels(operation: Operation) -> tuple[CutlassKernel, ...]:
    """Those that grouped and symmetric products may have."""
    alignment = tma_alignment(operation)
    every = tma_products(_PERSISTENT, operation, EpilogueSchedule.TMA, alignment, RULES)
    return legal(every, RULES)


@lru_cache(maxsize=16)
def padded_kernels(operation: Operation, epilogue: EpilogueSchedule) -> tuple[CutlassKernel, ...]:
    return legal(tma_products(_PERSISTENT, operation, epilogue, 1, RULES), RULES)


@lru_cache(maxsize=32)
def cpasync_kernels(operation: Operation, alignment: int) -> tuple[CutlassKernel, ...]:
    """Kernels whose producer warps copy with `cp.async`: for rows aligned to 4 bytes or more."""
    return legal(
        (
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
        ),
        RULES,
    )
