"""The kernels of this project that a problem is offered.

Kernels that split K within a cluster are for problems with too few tiles to fill the GPU; their
tiles are small, they load by TMA and store from registers. Kernels that iterate over the groups of
a grouped problem store by bulk copies.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture
from tuner.backends.backend import Level
from tuner.backends.cute.rules import RULES
from tuner.backends.cutlass.alignment import tma_reads, tma_stores
from tuner.backends.cutlass.lines import BOTH, ONE, PLAIN, SWAPPED, KernelLine, expand_all, suited
from tuner.backends.cutlass.lines import legal as allowed
from tuner.backends.cutlass.operation import tma_alignment
from tuner.backends.cutlass.products import tma_products

_SPLIT = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.CLUSTER_SPLIT_K)

_LINES = (
    KernelLine(schedule=_SPLIT, m=64, ns=(8, 16, 32), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_SPLIT, m=64, ns=(32,), clusters=ONE, swapped=PLAIN, depth=256),
    KernelLine(schedule=_SPLIT, m=64, ns=(64, 96, 128), clusters=ONE, swapped=BOTH, depth=256),
    # Two thread blocks per SM.
    KernelLine(
        schedule=_SPLIT, m=64, ns=(16, 32, 64), clusters=ONE, swapped=SWAPPED, depth=256, stages=4
    ),
    KernelLine(schedule=_SPLIT, m=128, ns=(64, 128), clusters=ONE, swapped=PLAIN, depth=256),
)

_WARPGROUP = (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GROUPS)
_PINGPONG = (MainloopSchedule.PINGPONG, TileScheduler.GROUPS)
_COOPERATIVE = (MainloopSchedule.COOPERATIVE, TileScheduler.GROUPS)

_GROUPS = (
    # Few tokens per expert: reading its weights once takes all the time, so as many bytes as fit
    # are kept in flight.
    KernelLine(schedule=_WARPGROUP, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(
        schedule=_WARPGROUP, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED, stages=6
    ),
    KernelLine(schedule=_PINGPONG, m=64, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=128, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=128, ns=(16, 32), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    # Many tokens per expert: tiles as wide as registers allow.
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(192, 256), clusters=ONE, swapped=BOTH),
    KernelLine(schedule=_PINGPONG, m=64, ns=(128, 256), clusters=ONE, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128,), clusters=ONE, swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(128,), clusters=ONE, swapped=PLAIN),
)

_UNALIGNED_D = (
    KernelLine(schedule=_SPLIT, m=64, ns=(16, 32, 64), clusters=ONE, swapped=BOTH, depth=256),
)
"""For outputs that TMA cannot store. Few, as the other backends offer few for such outputs too."""


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:  # noqa: ARG001
    """The kernels that take the problem; empty if TMA cannot read its rows."""
    if not tma_reads(problem):
        return ()
    operation = problem.operation
    if operation.is_grouped:
        return suited(grouped(operation, level), problem)
    if level is Level.FULL:
        return suited(every(operation), problem)
    return suited(curated(operation, tma_stores(problem)), problem)


@lru_cache(maxsize=16)
def curated(operation: Operation, aligned_d: bool) -> tuple[CutlassKernel, ...]:
    """The curated kernels. `aligned_d`: all rows of D start at multiples of 16 bytes."""
    lines = _LINES if aligned_d else _UNALIGNED_D
    return allowed(expand_all(lines, operation, EpilogueSchedule.NO_SMEM), RULES)


@lru_cache(maxsize=16)
def grouped(operation: Operation, level: Level) -> tuple[CutlassKernel, ...]:
    """The kernels that iterate over groups; they store D by bulk copies of at least 16 bytes."""
    if level is Level.FULL:
        schedules = (_WARPGROUP, _PINGPONG, _COOPERATIVE)
        alignment = tma_alignment(operation)
        return allowed(
            tma_products(schedules, operation, EpilogueSchedule.TMA, alignment, RULES), RULES
        )
    return allowed(expand_all(_GROUPS, operation, EpilogueSchedule.TMA), RULES)


@lru_cache(maxsize=8)
def every(operation: Operation) -> tuple[CutlassKernel, ...]:
    """Every legal kernel."""
    alignment = tma_alignment(operation)
    return allowed(
        tma_products((_SPLIT,), operation, EpilogueSchedule.NO_SMEM, alignment, RULES), RULES
    )
