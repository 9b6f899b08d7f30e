"""Kernels whose tile N is chosen for one problem, so that its tiles fill whole waves.

A problem with few tiles takes as long as its last wave: 7168 columns are 112 tiles of width 128 on
132 SMs, but 128 tiles of width 112, each with 12% less work. Instructions take every multiple of 8
as their width, so it is computed from the problem. The cost model decides which of these kernels
are worth compiling.
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
"""With more waves, the last one leaves a few percent idle, and the curated widths suffice."""

LEAST_FILL = 0.8
"""Least share of the waves' elements that are elements of D."""

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
    """All choices of a fitted kernel except tile N. `m` is tile M."""

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
                # Large clusters share reads that happen at the same time, and a kernel with one
                # block per tile does not overlap tiles: both gain in a single wave only.
                continue
            yield way, waves


WAYS = tuple(_ways())
"""Choices of a fitted kernel, each with the number of waves that its tiles are to fill."""


def kernels(like: CutlassKernel, problem: Problem, device: DeviceModel) -> list[CutlassKernel]:
    """Legal kernels with fitted tiles, and the types, layout, alignment and epilogue of `like`."""
    by_name: dict[str, CutlassKernel] = {}
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
            by_name.setdefault(kernel.name, kernel)
    return list(by_name.values())


@lru_cache(maxsize=64)
def build(like: CutlassKernel) -> None:
    """Create every kernel that `kernels` can return for `like`; `legal` caches them.

    They are up to 1,800, and take about 50 ms the first time.
    """
    for way, n in product(dict.fromkeys(way for way, _ in WAYS), widths(like.operation)):
        legal(like, way, n)


@lru_cache(maxsize=1 << 16)
def legal(like: CutlassKernel, way: Fit, n: int) -> CutlassKernel | None:
    """The kernel with tile N of `n`, and its name; None if a rule refuses it."""
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
    return 8 if operation.is_narrow_float else 16


def widths(operation: Operation) -> range:
    step = step_of(operation)
    return range(ceil(NARROWEST / step) * step, WIDEST + 1, step)


def _width(
    m: int, extents: tuple[int, int], batch: int, cluster: tuple[int, int], blocks: int, step: int
) -> int | None:
    """The least tile N with which all tiles run in `blocks` thread blocks.

    Returns None if that is impossible, or fills less than LEAST_FILL of them.
    """
    # Tiles along M in whole clusters, and the tiles along N for which blocks are left.
    tiles_m = ceil(extents[0] / (m * cluster[0])) * cluster[0]
    across = blocks // (tiles_m * batch) // cluster[1] * cluster[1]
    if across < 1:
        return None
    n = ceil(ceil(extents[1] / across) / step) * step
    useful = extents[0] * extents[1] * batch / (blocks * m * n)
    return n if NARROWEST <= n <= WIDEST and useful >= LEAST_FILL else None
