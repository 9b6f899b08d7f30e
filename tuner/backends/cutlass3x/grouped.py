"""The kernels that a grouped problem is offered: CUTLASS's pointer-array kernels.

If experts get few tokens, reading the weights takes all the time: their rows lie along the kernel's
M, and the tokens, few per tile, along its N (swapped). Wide tiles are for experts with many tokens,
and for weight gradients, whose outputs are as large as the weights. The lists extend the times of
six kernels at 13 problems (NVIDIA H200, 2026-11-23); most of their kernels were not measured then.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Grouping, Operation
from tuner.backends.backend import Level
from tuner.backends.cutlass.lines import (
    ALL,
    BOTH,
    M2,
    ONE,
    PLAIN,
    SWAPPED,
    KernelLine,
    expand_all,
    legal,
)
from tuner.backends.cutlass3x.full import persistent_kernels
from tuner.backends.cutlass3x.rules import RULES

_PINGPONG = (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT)
_COOPERATIVE = (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT)

_ROWS = (
    KernelLine(schedule=_PINGPONG, m=64, ns=(8, 16, 32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=64, ns=(16, 32), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_PINGPONG, m=128, ns=(16, 32, 64, 96), clusters=M2, swapped=SWAPPED),
    KernelLine(schedule=_PINGPONG, m=128, ns=(32,), clusters=ONE, swapped=SWAPPED, depth=256),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=ALL, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(16, 32, 64), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(128,), clusters=ALL, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(256,), clusters=ALL, swapped=BOTH),
    KernelLine(schedule=_PINGPONG, m=64, ns=(128, 256), clusters=M2, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=ALL, swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(128,), clusters=M2, swapped=PLAIN),
)

_DEPTH = (
    KernelLine(schedule=_PINGPONG, m=64, ns=(128, 256), clusters=ONE, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=ALL, swapped=PLAIN),
    KernelLine(schedule=_PINGPONG, m=128, ns=(128, 192), clusters=ONE, swapped=SWAPPED),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(128, 192, 256), clusters=ALL, swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=256, ns=(128,), clusters=ALL, swapped=PLAIN),
    KernelLine(schedule=_COOPERATIVE, m=128, ns=(256,), clusters=M2, swapped=SWAPPED),
)


@lru_cache(maxsize=16)
def kernels(operation: Operation, level: Level) -> tuple[CutlassKernel, ...]:
    """The kernels of a grouped operation."""
    if level is Level.FULL:
        return persistent_kernels(operation)
    lines = _ROWS if operation.grouping is Grouping.ROWS else _DEPTH
    return legal(expand_all(lines, operation, EpilogueSchedule.TMA), RULES)
