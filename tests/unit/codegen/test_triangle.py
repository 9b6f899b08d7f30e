"""The numbering of the tiles that a symmetric kernel computes (`triangle.hpp`), on the host."""

from __future__ import annotations

import subprocess
from collections import Counter
from itertools import product

import pytest

from gemmsmith.core.tiles import triangle_tiles
from tests.support.host import INCLUDE

SHAPES = ((64, 32), (64, 80), (128, 64), (128, 128), (128, 176), (128, 192), (128, 256))
SHAPES += ((256, 112), (256, 128), (256, 256), (512, 128), (128, 480), (1024, 512))
"""Rows and columns of a tile, or of a cluster's tiles together."""
EXTENTS = (1, 8, 63, 64, 65, 136, 520, 1000, 1024, 1032, 2048, 4096, 4104, 14336)
BANDS = (1, 2, 4, 8)

PROGRAM = r"""
#include <cstdio>
#include <initializer_list>
#include "gemmsmith/triangle.hpp"
template <int kM, int kN>
void show(int extent, int band) {
  gemmsmith::Triangle<kM, kN> triangle(extent, band);
  for (int i = 0; i < triangle.tiles; ++i) {
    auto tile = triangle.tile(i);
    printf("%d %d %d %d %d %d\n", kM, kN, extent, band, tile.row, tile.column);
  }
}
int main() {
  for (int extent : {EXTENTS})
    for (int band : {BANDS}) {
      SHOWN
    }
}
"""

Case = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[tuple[int, int]]]:
    """Rows and columns of tiles in their order, by the rows and columns of a tile, extent, band."""
    folder = tmp_path_factory.mktemp("triangle")
    shown = " ".join(f"show<{rows}, {columns}>(extent, band);" for rows, columns in SHAPES)
    text = PROGRAM.replace("SHOWN", shown)
    for name, values in (("EXTENTS", EXTENTS), ("BANDS", BANDS)):
        text = text.replace(name, ", ".join(map(str, values)))
    source, program = folder / "triangle.cpp", folder / "triangle"
    source.write_text(text)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", f"-I{INCLUDE}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    listed: dict[Case, list[tuple[int, int]]] = {}
    for line in lines.splitlines():
        *case, row, column = map(int, line.split())
        listed.setdefault(tuple(case), []).append((row, column))  # type: ignore[arg-type]
    return listed


def needed(rows: int, columns: int, extent: int) -> set[tuple[int, int]]:
    """The tiles with an element on the diagonal or below it."""
    places = product(range(-(-extent // rows)), range(-(-extent // columns)))
    return {(r, c) for r, c in places if min((r + 1) * rows, extent) > c * columns}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_tile_that_meets_the_triangle_has_one_number(
    tiles: dict[Case, list[tuple[int, int]]], shape: tuple[int, int]
) -> None:
    for extent, band in product(EXTENTS, BANDS):
        listed = tiles[*shape, extent, band]
        assert Counter(listed) == Counter(needed(*shape, extent)), (extent, band)


def test_a_band_is_computed_column_by_column(tiles: dict[Case, list[tuple[int, int]]]) -> None:
    listed = tiles[128, 128, 1024, 4]
    assert listed[:10] == [
        *((row, 0) for row in range(4)),
        *((row, 1) for row in range(1, 4)),
        *((row, 2) for row in range(2, 4)),
        (3, 3),
    ]
    assert [row for row, _ in listed] != sorted(row for row, _ in listed)
    assert [row // 4 for row, _ in listed] == sorted(row // 4 for row, _ in listed)


def test_the_library_counts_as_many() -> None:
    for shape, extent in product(SHAPES, EXTENTS):
        assert triangle_tiles(extent, shape, (1, 1)) == len(needed(*shape, extent))
    assert triangle_tiles(1000, (64, 80), (2, 1)) == 2 * len(needed(128, 80, 1000))
