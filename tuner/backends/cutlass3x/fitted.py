"""Kernels whose tile N is chosen for one problem, so that its tiles just fill whole waves.

A problem of few tiles is as slow as its last wave: 7168 columns in tiles of 128 are 112 tiles on
132 SMs, in tiles of 112 they are 128, and 12% less work each. Any multiple of 8 is an instruction
width, so the width follows from the problem. Which of them is worth compiling is the cost model's
business.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil
from typing import NamedTuple

from msgspec import structs

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tuner.arch import architecture
from tuner.backends.cutlass.operation import named
from tuner.backends.cutlass.rules import choice_refusal
from tuner.backends.cutlass3x.rules import RULES

MOST_WAVES = 3
"""Beyond, what the last wave leaves idle is a few percent, and the curated widths fill it."""

LEAST_FILL = 0.8
"""Share of the waves' tiles that must be the problem's."""

WIDEST = 256
NARROWEST = 24
"""Narrower tiles read more operand bytes per product than L2 delivers."""

_SCHEDULES = (
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID, 64),
    (MainloopSchedule.WARP_SPECIALIZED, TileScheduler.GRID, 128),
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, 64),
    (MainloopSchedule.PINGPONG, TileScheduler.PERSISTENT, 128),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, 128),
    (MainloopSchedule.COOPERATIVE, TileScheduler.PERSISTENT, 256),
)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4))


class Fit(NamedTuple):
    """All that is chosen of a fitted kernel but its tile N. `m`: tile M."""

    mainloop: MainloopSchedule
    scheduler: TileScheduler
    m: int
    swapped: bool
    cluster: tuple[int, int]


def _ways() -> Iterator[tuple[Fit, int]]:
    for schedule, swapped in product(_SCHEDULES, (False, True)):
        for cluster, waves in product(_CLUSTERS, range(1, MOST_WAVES + 1)):
            way = Fit(*schedule, swapped, cluster)
            if waves > 1 and (cluster[0] * cluster[1] == 4 or way.scheduler is TileScheduler.GRID):
                continue  # these are for a single wave: all reads at once, no tile after the first
            yield way, waves


WAYS = tuple(_ways())
"""Each with the number of waves that its tiles are to fill."""


def kernels(like: CutlassKernel, problem: Problem, device: DeviceModel) -> list[CutlassKernel]:
    """Legal kernels with fitted tiles, of the types, layout, alignment and epilogue of `like`."""
    found: dict[str, CutlassKernel] = {}
    step = step_of(problem.operation)
    arch = architecture(device.arch)
    for way, waves in WAYS:
        extents = (problem.n, problem.m) if way.swapped else (problem.m, problem.n)
        resident = arch.resident_blocks(device.sm_count, way.cluster[0] * way.cluster[1])
        n = _width(way.m, extents, problem.batch, way.cluster, resident * waves, step)
        if n is None:
            continue
        kernel = legal(like, way, n)
        if kernel is not None:
            found.setdefault(kernel.name, kernel)
    return list(found.values())


@lru_cache(maxsize=64)
def build(like: CutlassKernel) -> None:
    """Make every kernel that `kernels` can give for `like`, so that it is quick from then on.

    Up to 1,800 of them; takes about 50 ms the first time.
    """
    for way, n in product(dict.fromkeys(way for way, _ in WAYS), widths(like.operation)):
        legal(like, way, n)


@lru_cache(maxsize=1 << 16)
def legal(like: CutlassKernel, way: Fit, n: int) -> CutlassKernel | None:
    """The kernel whose tiles are `n` wide, with its name; None where a rule refuses it."""
    kernel = structs.replace(
        like,
        tile=(way.m, n, 128 // like.operation.a.bytes),
        cluster=way.cluster,
        stages=0,
        mainloop=way.mainloop,
        scheduler=way.scheduler,
        swapped=way.swapped,
        fast_accumulation=like.operation.is_narrow_float,
    )
    return named(kernel) if choice_refusal(kernel, RULES) is None else None


def step_of(operation: Operation) -> int:
    """What widths are a multiple of."""
    return 8 if operation.is_narrow_float else 16


def widths(operation: Operation) -> range:
    """All that tile N may be."""
    step = step_of(operation)
    return range(ceil(NARROWEST / step) * step, WIDEST + 1, step)


def _width(
    m: int, extents: tuple[int, int], batch: int, cluster: tuple[int, int], blocks: int, step: int
) -> int | None:
    """The least tile N with which all tiles are in `blocks` at once; None if that is no fit."""
    tiles_m = ceil(extents[0] / (m * cluster[0])) * cluster[0]
    across = blocks // (tiles_m * batch) // cluster[1] * cluster[1]
    if across < 1:
        return None
    n = ceil(ceil(extents[1] / across) / step) * step
    useful = extents[0] * extents[1] * batch / (blocks * m * n)
    return n if NARROWEST <= n <= WIDEST and useful >= LEAST_FILL else None
