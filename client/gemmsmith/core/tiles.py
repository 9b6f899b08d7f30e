"""How a problem falls into output tiles, in the kernel's own orientation."""

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
    """The products of one call, `number` of them, each of these extents."""

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
        """All output tiles, those that only fill up a cluster included."""
        return self.tiles_m * self.tiles_n * self.batch


def products(problem: Problem) -> Products:
    """What a problem comes to: of groups, with an even share of the tokens each.

    With fewer tokens than groups, so many groups have one. By depth the others' D is written too.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    grouping = problem.operation.grouping
    if grouping is Grouping.ROWS:
        groups = min(batch, m)
        return Products(m // groups, n, k, groups)
    if grouping is Grouping.DEPTH:
        return Products(m, n, max(1, k // batch), batch)
    return Products(m, n, k, batch)


def tile_grid(kernel: CutlassKernel, problem: Problem) -> TileGrid:
    """The tiles of a problem under a kernel: swapped ones run their M along the problem's N."""
    each = products(problem)
    m, n = (each.n, each.m) if kernel.swapped else (each.m, each.n)
    tile_m, tile_n, tile_k = kernel.tile
    cluster_m, cluster_n = kernel.cluster
    return TileGrid(
        padded_tiles(m, tile_m, cluster_m),
        padded_tiles(n, tile_n, cluster_n),
        each.number,
        -(-each.k // tile_k),
    )


def padded_tiles(extent: N, tile: N, cluster: N) -> N:
    """Tiles along one side, padded to whole clusters; of numbers or of columns of them."""
    return -(-extent // (tile * cluster)) * cluster
