"""The output tiles of a problem, in the kernel's own orientation."""

from __future__ import annotations

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
    """Output tiles along the kernel's M and N (padded to whole clusters), and batches or groups."""

    tiles_m: int
    tiles_n: int
    batch: int
    k_tiles: int

    @property
    def tiles(self) -> int:
        # Includes tiles that only pad a cluster.
        return self.tiles_m * self.tiles_n * self.batch


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
    return TileGrid(
        padded_tiles(m, tile_m, cluster_m),
        padded_tiles(n, tile_n, cluster_n),
        product.number,
        -(-product.k // tile_k),
    )


def padded_tiles(extent: N, tile: N, cluster: N) -> N:
    """Tiles along one dimension, padded to whole clusters. Takes integers or numpy arrays."""
    return -(-extent // (tile * cluster)) * cluster
