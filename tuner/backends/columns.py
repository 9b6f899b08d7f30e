"""What is offered to many problems at once, in columns: for lookups that predict thousands.

`tuner.backends` says what is legal, kernel by kernel; what is here comes to the same in numbers, of
CUTLASS kernels only. Both are held against each other (`tests/unit/search/test_predict_many.py`).
All numbers are floats: sizes are exact in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import TMA_MAINLOOPS, Backend, CutlassKernel, TileScheduler
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import padded_tiles
from tuner.arch import architecture
from tuner.backends.cutlass import launches
from tuner.backends.cutlass.alignment import alike, of_kernels
from tuner.backends.cutlass.grid import MIN_K_TILES_PER_STREAM_K_UNIT
from tuner.backends.cutlass3x import fitted

if TYPE_CHECKING:
    from numpy import bool_, float64, int64
    from numpy.typing import NDArray

    Column = NDArray[float64]
    Places = NDArray[int64]
    Mask = NDArray[bool_]


class Extents(NamedTuple):
    """Problems, an entry for each."""

    m: Column
    n: Column
    k: Column
    batch: Column

    def take(self, places: Places) -> Extents:
        """Those at these places."""
        return Extents(*(column[places] for column in self))


class Traits(NamedTuple):
    """What the launches of kernels depend on, an entry for each."""

    single: Column  # it has one launch; no is 0, yes is 1
    split_k: Column
    stream_k: Column
    cluster_split_k: Column
    swapped: Column
    tile_m: Column
    tile_n: Column
    tile_k: Column
    cluster_m: Column
    cluster_n: Column
    resident: Column  # blocks that run at once
    alignment: Column  # of A, in elements

    @classmethod
    def of(cls, kernels: Sequence[CutlassKernel], device: DeviceModel) -> Traits:
        """The kernels' traits on a device."""
        import numpy

        arch = architecture(device.arch)
        rows = []
        for kernel in kernels:
            scheduler, (m, n) = kernel.scheduler, kernel.cluster
            single = kernel.backend is Backend.CUTLASS2X or scheduler is TileScheduler.GRID
            splits = (
                scheduler is each and not single
                for each in (
                    TileScheduler.SPLIT_K,
                    TileScheduler.STREAM_K,
                    TileScheduler.CLUSTER_SPLIT_K,
                )
            )
            resident = arch.resident_blocks(device.sm_count, m * n)
            row = (single, *splits, kernel.swapped, *kernel.tile, m, n, resident)
            rows.append((*row, kernel.alignment_a))
        return cls(*numpy.array(rows, dtype=float).T)

    def take(self, places: Places) -> Traits:
        """Those at these places."""
        return Traits(*(column[places] for column in self))


class Launches(NamedTuple):
    """Launches in numbers, an entry for each: of the kernel and the problem at `places`."""

    places: Places
    along_m: Column
    raster_heuristic: Column
    swizzle: Column
    split_k: Column
    stream_k: Column
    splits: Column

    def named(self, places: Places) -> Iterator[Launch]:
        """Those at these places, as the rest of the program calls them."""
        import numpy

        for numbers in numpy.array(self[1:])[:, places].T.tolist():
            along_m, raster_heuristic, swizzle, split_k, stream_k, splits = numbers
            raster = RasterOrder.ALONG_M if along_m else RasterOrder.ALONG_N
            if raster_heuristic:
                raster = RasterOrder.HEURISTIC
            decomposition = Decomposition.DATA_PARALLEL
            if split_k or stream_k:
                decomposition = Decomposition.SPLIT_K if split_k else Decomposition.STREAM_K
            yield launches.launch_of(raster, int(swizzle), decomposition, int(splits))

    @classmethod
    def of(
        cls,
        places: Places,
        *,
        along_m: Column | float = 0.0,
        raster_heuristic: float = 0.0,
        swizzle: Column | float = 1.0,
        split_k: Column | float = 0.0,
        stream_k: float = 0.0,
        splits: Column | float = 1.0,
    ) -> Launches:
        """Launches that have some of their numbers in common."""
        import numpy

        numbers = numpy.empty((6, len(places)))
        numbers[0], numbers[1], numbers[2] = along_m, raster_heuristic, swizzle
        numbers[3], numbers[4], numbers[5] = split_k, stream_k, splits
        return cls(places, *numbers)


def every_launch(kernel: Traits, problem: Extents, device: DeviceModel) -> Launches:
    """As `launches.launches` for each kernel with the problem beside it, in no order."""
    import numpy

    m = numpy.where(kernel.swapped, problem.n, problem.m)
    n = numpy.where(kernel.swapped, problem.m, problem.n)
    tiles_m = padded_tiles(m, kernel.tile_m, kernel.cluster_m)
    tiles_n = padded_tiles(n, kernel.tile_n, kernel.cluster_n)
    tiles = tiles_m * tiles_n * problem.batch
    k_tiles = -(-problem.k // kernel.tile_k)
    along_m = (tiles_n > tiles_m).astype(float)  # `grid.heuristic_raster`

    def among(condition: Mask) -> Places:
        return numpy.flatnonzero(condition)

    split_k, stream_k = kernel.split_k > 0, kernel.stream_k > 0
    in_cluster, single = kernel.cluster_split_k > 0, kernel.single > 0
    area = problem.m * problem.n * problem.batch
    most_area = launches.MAX_SPLIT_WAVES * device.sm_count * kernel.tile_m * kernel.tile_n
    small = ~(split_k | in_cluster) | (area <= most_area)
    found = [Launches.of(among(single), raster_heuristic=1.0)]

    ordered = ~(single | split_k | stream_k | in_cluster)
    one_line = (tiles_m == kernel.cluster_m) | (tiles_n == kernel.cluster_n)
    there = among(ordered & one_line)
    found.append(Launches.of(there, along_m=along_m[there]))
    shorter = numpy.minimum(tiles_m, tiles_n)
    for swizzle, least in zip(launches.SWIZZLES, (1, 2, 3, 6), strict=True):
        there = among(ordered & ~one_line & (shorter >= least))  # `grid.effective_swizzle`
        found += (Launches.of(there, along_m=way, swizzle=swizzle) for way in (1.0, 0.0))

    most = numpy.minimum(
        k_tiles // launches.MIN_K_TILES_PER_CLUSTER_SPLIT,
        launches.MAX_SPLIT_WAVES * device.sm_count // tiles,
    )
    for count in launches.CLUSTER_SPLITS:
        there = among(in_cluster & small & (count <= most))
        split = float(count > 1)
        found.append(Launches.of(there, raster_heuristic=1.0, split_k=split, splits=count))

    even = [waves * kernel.resident // tiles for waves in (1, 2)]
    most = numpy.minimum(
        k_tiles // launches.MIN_K_TILES_PER_SPLIT,
        launches.MAX_SPLIT_WAVES * kernel.resident // tiles,
    )
    near = among((split_k | stream_k) & small & (most >= 2))
    splits = numpy.arange(2.0, launches.SPLITS[-1] + 1)[:, None]
    sliced = split_k[near]
    usual = numpy.where(
        sliced, numpy.isin(splits, launches.SLICES), numpy.isin(splits, launches.SPLITS)
    )
    usual |= (even[0][near] == splits) | (even[1][near] == splits)
    equal = problem.k[near] % (splits * kernel.alignment[near]) == 0  # `legality.slices_are_equal`
    counts, there = numpy.nonzero(usual & (splits <= most[near]) & (equal | ~sliced))
    there = near[there]
    found.append(Launches.of(there, along_m=along_m[there], split_k=1.0, splits=splits[counts, 0]))
    uneven = (tiles % kernel.resident > 0) & (k_tiles > MIN_K_TILES_PER_STREAM_K_UNIT)
    there = among(stream_k & uneven)
    found.append(Launches.of(there, along_m=along_m[there], stream_k=1.0))
    return Launches(*(numpy.concatenate(columns) for columns in zip(*found, strict=True)))


def likeness(problem: Problem, arch: str) -> Problem:
    """One for all problems that are offered the same kernels, fitted ones apart.

    Raises:
        NoLegalCandidate: unknown architecture.
    """
    return alike(of_kernels(problem), architecture(arch))


class Fitted:
    """The kernels fitted to problems (`cutlass3x.fitted`) that share what `like` says.

    Attributes:
        kernels: those that were ever offered; the first are the curated ones.
    """

    def __init__(self, curated: Sequence[CutlassKernel], device: DeviceModel) -> None:
        import numpy

        self.kernels = list(curated)
        self._like = like = curated[0]  # those of CUTLASS 3.x come first
        there = like.backend is Backend.CUTLASS3X and like.mainloop in TMA_MAINLOOPS
        arch = architecture(device.arch)
        ways = [
            (way.m, way.swapped, m, n, waves * arch.resident_blocks(device.sm_count, m * n))
            for way, waves in (fitted.WAYS if there else ())
            for m, n in [way.cluster]
        ]
        self._ways: Column = numpy.array(ways, dtype=float).reshape(-1, 5).T[:, :, None]
        self._known = {kernel.name for kernel in curated}
        self._places: dict[tuple[int, int], int] = {}

    def offered(self, problem: Extents) -> tuple[Places, Places]:
        """Places of problems, and of the kernels that are offered to each."""
        import numpy

        widths = self._widths(problem)
        ways, problems = numpy.nonzero(widths)
        wanted, back = numpy.unique(
            ways * (fitted.WIDEST + 1) + widths[ways, problems].astype(int), return_inverse=True
        )
        known = [self._place(*divmod(each, fitted.WIDEST + 1)) for each in wanted.tolist()]
        kernels = numpy.array(known, dtype=int)[back]
        return problems[kernels >= 0], kernels[kernels >= 0]

    def make_all(self) -> None:
        """Make every kernel that may be offered, which else is made when it is."""
        for number in range(self._ways.shape[1]):
            for width in fitted.widths(self._like.operation):
                self._place(number, width)

    def _widths(self, problem: Extents) -> Column:
        """Tile N by way (a row) and problem (a column), as `fitted.kernels` has it; 0 for none."""
        import numpy

        step = fitted.step_of(self._like.operation)
        tile_m, swapped, cluster_m, cluster_n, blocks = self._ways
        m = numpy.where(swapped, problem.n, problem.m)
        n = numpy.where(swapped, problem.m, problem.n)
        tiles_m = -(-m // (tile_m * cluster_m)) * cluster_m
        across = blocks // (tiles_m * problem.batch) // cluster_n * cluster_n
        widths = numpy.ceil(numpy.ceil(n / numpy.maximum(across, 1)) / step) * step
        useful = m * n * problem.batch / (blocks * tile_m * widths)
        fits = (across >= 1) & (widths >= fitted.NARROWEST) & (widths <= fitted.WIDEST)
        found: Column = numpy.where(fits & (useful >= fitted.LEAST_FILL), widths, 0.0)
        return found

    def _place(self, number: int, width: int) -> int:
        """The place of a kernel among `kernels`; -1 where there is none, or it is curated."""
        key = (number, width)
        if key not in self._places:
            kernel = fitted.legal(self._like, fitted.WAYS[number][0], width)
            place = -1
            if kernel is not None and kernel.name not in self._known:
                place = len(self.kernels)
                self.kernels.append(kernel)
            self._places[key] = place
        return self._places[key]
