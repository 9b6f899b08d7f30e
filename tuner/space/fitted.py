"""Kernels whose tile N is chosen for one problem, so that its tiles just fill whole waves.

A problem of few tiles is as slow as its last wave: 7168 columns in tiles of 128 are 112 tiles on
132 SMs, in tiles of 112 they are 128, and 12% less work each. Any multiple of 8 is an instruction
width, so the width follows from the problem. Which of them is worth compiling is the cost model's
business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import Kernel, MainloopSchedule, TileScheduler
from gemmsmith.problem import Problem
from tuner.space.legality import choice_refusal
from tuner.space.operation import named

MOST_WAVES = 4
"""Beyond, what the last wave leaves idle is a few percent, and the curated widths fill it."""

LEAST_FILL = 0.8
"""Share of the waves' tiles that must be the problem's."""

NARROWEST = 32
"""Narrower tiles read more operand bytes per product than L2 delivers."""

_SCHEDULES = (
    (MainloopSchedule.PINGPONG, 64),
    (MainloopSchedule.PINGPONG, 128),
    (MainloopSchedule.COOPERATIVE, 128),
    (MainloopSchedule.COOPERATIVE, 256),
)


def kernels(like: Kernel, problem: Problem, device: DeviceModel) -> list[Kernel]:
    """Legal kernels with fitted tiles, of the types, layout, alignment and epilogue of `like`."""
    found: dict[str, Kernel] = {}
    for mainloop, m in _SCHEDULES:
        for swapped in (False, True):
            extents = (problem.n, problem.m) if swapped else (problem.m, problem.n)
            for n, cluster in _widths(m, extents, problem.batch, device.sm_count):
                kernel = replace(
                    like,
                    tile=(m, n, 128 // problem.dtype.a.bytes),
                    cluster=cluster,
                    stages=0,
                    mainloop=mainloop,
                    scheduler=TileScheduler.PERSISTENT,
                    swapped=swapped,
                    fast_accumulation=problem.dtype.is_fp8,
                )
                if choice_refusal(kernel) is None:
                    kernel = named(kernel)
                    found.setdefault(kernel.name, kernel)
    return list(found.values())


def _widths(
    m: int, extents: tuple[int, int], batch: int, sm_count: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """(tile N, cluster) pairs that fill one to a few waves."""
    tiles_m = ceil(extents[0] / m)
    for waves in range(1, MOST_WAVES + 1):
        across = waves * sm_count // (tiles_m * batch)
        if across < 1:
            continue
        n = ceil(ceil(extents[1] / across) / 16) * 16
        tiles_n = ceil(extents[1] / n)
        tiles = tiles_m * batch * tiles_n
        useful = extents[0] * extents[1] * batch / (waves * sm_count * m * n)
        if n < NARROWEST or n > 256 or useful < LEAST_FILL:
            continue
        yield n, (1, 1)
        if tiles_m % 2 == 0 and tiles <= waves * (sm_count - sm_count % 2):
            yield n, (2, 1)
        if tiles_n % 2 == 0 and tiles <= waves * (sm_count - sm_count % 2):
            yield n, (1, 2)
