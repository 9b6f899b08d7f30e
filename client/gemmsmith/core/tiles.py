"""The output tiles of a problem, in the kernel's own orientation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gemmsmith.core.kernel import CutlassKernel
from gemmsmith.core.operation import Grouping
from gemmsmith.core.problem import Problem

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

N = TypeVar("N", int, "NDArray[float64]")


class Products(NamedTuple):
    """The products of a call: `number` products, each of these extents."""

    m: int
    n: int
    k: int
    number: int


class TileGrid(NamedTuple):
    """Output tiles along the kernel's M and N (padded to whole clusters), and batches or groups.

    `computed` are those of one output, also if they only pad a cluster; about half of a symmetric
    one's.
    """

    tiles_m: int
    tiles_n: int
    batch: int
    k_tiles: int
    computed: int

    @property
    def tiles(self) -> int:
        return self.computed * self.batch


def products(problem: Problem) -> Products:
    """The products of a problem. Groups are assumed to share the tokens equally."""
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    grouping = problem.operation.grouping
    if grouping is Grouping.ROWS:
        # With fewer tokens than groups, as many groups as tokens have a token each. By depth, in
        # contrast, the D of an empty group is written as well.
        groups = min(batch, m)
        return Products(m // groups, n, k, groups)
    if grouping is Grouping.DEPTH:
        return Products(m, n, max(1, k // batch), batch)
    return Products(m, n, k, batch)


def tile_grid(kernel: CutlassKernel, problem: Problem) -> TileGrid:
    """The tiles of a problem for a kernel. A swapped kernel's M runs along the problem's N."""
    product = products(problem)
    m, n = (product.n, product.m) if kernel.swapped else (product.m, product.n)
    tile_m, tile_n, tile_k = kernel.tile
    cluster_m, cluster_n = kernel.cluster
    tiles_m, tiles_n = padded_tiles(m, tile_m, cluster_m), padded_tiles(n, tile_n, cluster_n)
    computed = tiles_m * tiles_n
    if problem.operation.symmetric:
        computed = triangle_tiles(m, kernel.tile[:2], kernel.cluster)
    return TileGrid(tiles_m, tiles_n, product.number, -(-product.k // tile_k), computed)


@lru_cache(maxsize=4096)
def triangle_tiles(extent: int, tile: tuple[int, int], cluster: tuple[int, int]) -> int:
    """Tiles of a square matrix in clusters that meet its lower triangle (`triangle.hpp`)."""
    rows, columns = tile[0] * cluster[0], tile[1] * cluster[1]
    ends = range(rows, extent + rows, rows)
    clusters = sum(-(-min(end, extent) // columns) for end in ends)
    return clusters * cluster[0] * cluster[1]


def padded_tiles(extent: N, tile: N, cluster: N) -> N:
    """Tiles along one dimension, padded to whole clusters. Takes integers or numpy arrays."""
    return -(-extent // (tile * cluster)) * cluster
