"""How a problem falls into output tiles, in the kernel's own orientation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gemmsmith.kernel import CutlassKernel
from gemmsmith.problem import Problem

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

N = TypeVar("N", int, "NDArray[float64]")


class TileGrid(NamedTuple):
    """Output tiles along the kernel's M and N (padded to whole clusters), and batches."""

    tiles_m: int
    tiles_n: int
    batch: int
    k_tiles: int

    @property
    def tiles(self) -> int:
        """All output tiles, those that only fill up a cluster included."""
        return self.tiles_m * self.tiles_n * self.batch


def extents(kernel: CutlassKernel, problem: Problem) -> tuple[int, int]:
    """(M, N) as the kernel sees them: swapped kernels run their M along the problem's N."""
    return (problem.n, problem.m) if kernel.swapped else (problem.m, problem.n)


def tile_grid(kernel: CutlassKernel, problem: Problem) -> TileGrid:
    """The tiles of a problem under a kernel."""
    m, n = extents(kernel, problem)
    tile_m, tile_n, tile_k = kernel.tile
    cluster_m, cluster_n = kernel.cluster
    return TileGrid(
        padded_tiles(m, tile_m, cluster_m),
        padded_tiles(n, tile_n, cluster_n),
        problem.batch,
        -(-problem.k // tile_k),
    )


def padded_tiles(extent: N, tile: N, cluster: N) -> N:
    """Tiles along one side, padded to whole clusters; of numbers or of columns of them."""
    return -(-extent // (tile * cluster)) * cluster
