"""The tiles of problems, especially of those whose groups share an extent."""

from __future__ import annotations

import pytest

from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import products, tile_grid
from tests.support.candidates import KERNEL
from tests.support.replacing import replace

WIDE = replace(KERNEL, tile=(128, 64, 64))
SWAPPED = replace(WIDE, swapped=True)


def rows(tokens: int, groups: int) -> Problem:
    return Problem.of(Operation.of("bf16", grouping="rows"), tokens, 640, 320, groups)


@pytest.mark.parametrize(
    ("tokens", "groups", "tiles", "swapped"),
    [
        (1024, 8, 8 * 1 * 10, 5 * 2 * 8),
        (1032, 8, 8 * 2 * 10, 5 * 3 * 8),  # 129 in each group
        (1025, 8, 8 * 1 * 10, 5 * 2 * 8),  # a single group has 129
        (16, 128, 16 * 10, 16 * 5),  # sixteen groups with a token each
        (1, 1, 10, 5),
    ],
)
def test_tiles_of_rows_are_those_of_every_groups_share(
    tokens: int, groups: int, tiles: int, swapped: int
) -> None:
    assert tile_grid(WIDE, rows(tokens, groups)).tiles == tiles
    assert tile_grid(SWAPPED, rows(tokens, groups)).tiles == swapped
    assert tile_grid(WIDE, rows(tokens, groups)).k_tiles == 5


def test_tiles_of_depth_are_every_groups_and_share_the_k_tiles() -> None:
    operation = Operation.of("bf16", "nt", grouping="depth")
    grid = tile_grid(WIDE, Problem.of(operation, 256, 640, 8192, 32))
    assert (grid.tiles, grid.k_tiles) == (2 * 10 * 32, 4)
    few = tile_grid(WIDE, Problem.of(operation, 256, 640, 16, 32))
    assert (few.tiles, few.k_tiles) == (2 * 10 * 32, 1)


def test_without_groups_products_are_the_problems_own() -> None:
    assert products(Problem(m=1, n=2, k=3, batch=4)) == (1, 2, 3, 4)
