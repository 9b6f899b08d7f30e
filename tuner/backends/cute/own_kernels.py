"""Which of our own kernels a problem is offered.

Those that split K within a cluster, for problems with too few tiles to fill the GPU, while tiles
are small; they load by TMA and store from registers. And those that walk the groups of a grouped
problem; they store by bulk copies.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import Architecture
from tuner.backends.backend import Level
from tuner.backends.cute.rules import RULES
from tuner.backends.cutlass.alignment import d_is_whole, tma_reads
from tuner.backends.cutlass.lines import BOTH, ONE, PLAIN, SWAPPED, KernelLine, expand, suited
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
    # Few tokens an expert: its weights are read once, by as many bytes in flight as fit.
    KernelLine(schedule=_WARPGROUP, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(
        schedule=_WARPGROUP, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED, stages=6
    ),
    KernelLine(schedule=_PINGPONG, m=64, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=128, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=128, ns=(16, 32), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(16, 32, 64, 128), clusters=ONE, swapped=SWAPPED),
    # Many: tiles as wide as registers allow.
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(192, 256), clusters=ONE, swapped=BOTH),
    KernelLine(schedule=_PINGPONG, m=64, ns=(128, 256), clusters=ONE, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128,), clusters=ONE, swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(128,), clusters=ONE, swapped=PLAIN),
)

_UNALIGNED_D = (
    KernelLine(schedule=_SPLIT, m=64, ns=(16, 32, 64), clusters=ONE, swapped=BOTH, depth=256),
)
"""For outputs that the other kernels cannot store by TMA either: fewer of those, too."""


@lru_cache(maxsize=1024)
def legal(problem: Problem, arch: Architecture, level: Level) -> tuple[CutlassKernel, ...]:  # noqa: ARG001
    """The kernels that suit the problem; none where TMA cannot read its rows."""
    if not tma_reads(problem):
        return ()
    operation = problem.operation
    if operation.is_grouped:
        return suited(grouped(operation, level), problem)
    found = every(operation) if level is Level.FULL else curated(operation, d_is_whole(problem))
    return suited(found, problem)


@lru_cache(maxsize=16)
def curated(operation: Operation, whole: bool) -> tuple[CutlassKernel, ...]:
    """The curated kernels, for rows of D that start on 16 bytes or do not."""
    lines = _LINES if whole else _UNALIGNED_D
    unjudged = (
        each for line in lines for each in expand(line, operation, EpilogueSchedule.NO_SMEM)
    )
    return allowed(unjudged, RULES)


@lru_cache(maxsize=16)
def grouped(operation: Operation, level: Level) -> tuple[CutlassKernel, ...]:
    """The kernels that walk groups; they store D by bulk copies of 16 bytes and more."""
    if level is Level.FULL:
        schedules = (_WARPGROUP, _PINGPONG, _COOPERATIVE)
        alignment = tma_alignment(operation)
        return allowed(
            tma_products(schedules, operation, EpilogueSchedule.TMA, alignment, RULES), RULES
        )
    unjudged = (each for line in _GROUPS for each in expand(line, operation, EpilogueSchedule.TMA))
    return allowed(unjudged, RULES)


@lru_cache(maxsize=8)
def every(operation: Operation) -> tuple[CutlassKernel, ...]:
    """Every legal kernel."""
    alignment = tma_alignment(operation)
    return allowed(
        tma_products((_SPLIT,), operation, EpilogueSchedule.NO_SMEM, alignment, RULES), RULES
    )
