"""The kernels that a symmetric product is offered.

With half of the tiles, fewer problems have many waves, so the width of a tile decides: at N = 2048,
tiles of 128×128 are 136, and tiles of 128×160 are 115, one wave of an H100. The list has all widths
that are multiples of 16. On an H100 and an H200 (2026-11-27) widths from 64 to 256 won.
"""

from __future__ import annotations

from functools import lru_cache

from gemmsmith.core.kernel import CutlassKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.backends.backend import Level
from tuner.backends.cutlass.lines import ALL, M2, PAIRS, PLAIN, KernelLine, expand_all, legal
from tuner.backends.cutlass3x.full import persistent_kernels
from tuner.backends.cutlass3x.rules import RULES

_PINGPONG = (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT)
_COOPERATIVE = (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT)

_LINES = (
    KernelLine(schedule=_PINGPONG, m=64, ns=(32, 64), clusters=M2, swapped=PLAIN, depth=256),
    KernelLine(schedule=_PINGPONG, m=64, ns=tuple(range(48, 257, 16)), clusters=M2, swapped=PLAIN),
    KernelLine(
        schedule=_PINGPONG, m=128, ns=tuple(range(64, 193, 16)), clusters=ALL, swapped=PLAIN
    ),
    KernelLine(
        schedule=_COOPERATIVE, m=128, ns=tuple(range(128, 257, 16)), clusters=ALL, swapped=PLAIN
    ),
    KernelLine(
        schedule=_COOPERATIVE, m=256, ns=tuple(range(64, 161, 16)), clusters=PAIRS, swapped=PLAIN
    ),
)


@lru_cache(maxsize=16)
def kernels(operation: Operation, level: Level) -> tuple[CutlassKernel, ...]:
    """The kernels of a symmetric operation."""
    if level is Level.FULL:
        return persistent_kernels(operation)
    return legal(expand_all(_LINES, operation, EpilogueSchedule.TMA), RULES)
