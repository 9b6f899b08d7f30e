"""The kernels of CUTLASS 2.x that a problem is offered.

On sm90 and sm100 they are the last resort, for rows that no other kernel can read. On architectures
without kernels of CUTLASS 3.x they are the only kernels: those that CUTLASS generates, with the
widest copies that the problem's rows allow.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import SM90, SM100, Architecture
from tuner.backends.backend import Level
from tuner.backends.cutlass import generated
from tuner.backends.cutlass.alignment import cpasync_alignment, tma_reads, tma_stores
from tuner.backends.cutlass.lines import legal as allowed
from tuner.backends.cutlass.lines import suited
from tuner.backends.cutlass.operation import kernel
from tuner.backends.cutlass2x.rules import RULES

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:  # noqa: ARG001
    """The kernels that take the problem; empty if kernels of CUTLASS 3.x read its rows faster."""
    if _is_for_3x(problem, arch):
        return ()
    if kernels := suited(generated.kernels(problem.operation, arch), problem):
        widest = max(kernel.alignment_a for kernel in kernels)
        return tuple(kernel for kernel in kernels if kernel.alignment_a == widest)
    return suited(multistage_kernels(problem.operation, arch), problem)


def _is_for_3x(problem: Problem, arch: Architecture) -> bool:
    if arch is SM90:
        return cpasync_alignment(problem) > 0
    return arch is SM100 and tma_reads(problem) and tma_stores(problem)


@lru_cache(maxsize=16)
def multistage_kernels(
    operation: Operation, arch: Architecture = SM90
) -> tuple[CutlassKernel, ...]:
    """The kernels that take any alignment."""
    depth = 512 // operation.a.bits
    return allowed(
        (
            kernel(
                operation=operation,
                tile=(m, n, depth),
                stages=2,
                mainloop=MainloopSchedule.MULTISTAGE,
                epilogue=EpilogueSchedule.THREADBLOCK,
                scheduler=TileScheduler.GRID,
                alignment=1,
                arch=arch.name,
                name=False,
            )
            for m, n in TILES
        ),
        RULES,
    )
