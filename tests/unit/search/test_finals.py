"""Who enters the finals."""

from __future__ import annotations

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Kernel, TileScheduler
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType, Problem
from tuner.backends import kernels
from tuner.search.finals import finalists

SPACE = [
    kernel
    for kernel in kernels(Problem(m=1536, n=1536, k=8192, dtype=DType.BF16))
    if kernel.scheduler is TileScheduler.PERSISTENT
]


def _of_tile(tile: tuple[int, int]) -> Kernel:
    return next(kernel for kernel in SPACE if kernel.tile[:2] == tile and not kernel.swapped)


def _launched(kernel: Kernel, swizzle: int) -> Candidate:
    return Candidate(kernel=kernel, launch=Launch(swizzle=swizzle))


WIDE = [_launched(_of_tile((128, 160)), swizzle) for swizzle in (1, 2, 4, 8)]
NARROW = [_launched(_of_tile((128, 144)), swizzle) for swizzle in (1, 2)]


def test_one_tile_takes_half_of_the_places_where_another_is_there() -> None:
    assert finalists([*WIDE, *NARROW], 4) == [WIDE[0], WIDE[1], NARROW[0], NARROW[1]]


def test_the_order_stays_that_of_speed() -> None:
    mixed = [WIDE[0], NARROW[0], WIDE[1], WIDE[2], NARROW[1]]
    assert finalists(mixed, 4) == [WIDE[0], NARROW[0], WIDE[1], NARROW[1]]


def test_places_that_no_other_tile_fills_go_to_the_fastest() -> None:
    assert finalists([*WIDE, NARROW[0]], 4) == [WIDE[0], WIDE[1], WIDE[2], NARROW[0]]
    assert finalists(WIDE, 3) == WIDE[:3]


def test_fewer_than_the_places_all_enter() -> None:
    assert finalists([WIDE[0], NARROW[0]], 8) == [WIDE[0], NARROW[0]]
    assert finalists([], 8) == []
    assert finalists(WIDE, 1) == [WIDE[0]]
