"""Which kernels of CUTLASS 2.x a problem is offered: the last resort, for rows of any alignment."""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.legality import problem_refusal
from gemmsmith.operation import Operation
from gemmsmith.problem import Problem
from tuner.arch import Architecture
from tuner.backends.backend import Level
from tuner.backends.cutlass.alignment import cpasync_alignment
from tuner.backends.cutlass.lines import legal as allowed
from tuner.backends.cutlass.operation import kernel
from tuner.backends.cutlass2x.rules import RULES

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:  # noqa: ARG001
    """The kernels that suit the problem; none where its rows can be copied faster."""
    if cpasync_alignment(problem):
        return ()
    found = multistage_kernels(problem.operation)
    return tuple(each for each in found if problem_refusal(each, problem) is None)


@lru_cache(maxsize=16)
def multistage_kernels(operation: Operation) -> tuple[CutlassKernel, ...]:
    """Kernels that take any alignment."""
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
                name=False,
            )
            for m, n in TILES
        ),
        RULES,
    )
