"""An analytic model of a GEMM's time: enough to order candidates, not to time them.

A kernel's time is taken as launch overhead plus the slowest of three: what its busiest SM computes
and loads, what comes from device memory, and the fixed latencies in between. Numbers are
effective rates fitted to few measurements on one NVIDIA H200 (2026-11-20, BF16 `tn`), rounded;
each constant says which. Pure arithmetic, the same answer every time, done in columns with an
entry for each candidate: hundreds cost little more than one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.launch import Decomposition, Launch, RasterOrder
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import padded_tiles, products, triangle_tiles
from tuner.arch import architecture
from tuner.backends import features
from tuner.backends.backend import UNKNOWN, Features
from tuner.backends.cutlass.features import CLUSTER_SYNC_US, EPILOGUE_US

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Column = NDArray[float64]

N = TypeVar("N")

CLOCK_BURST = 1.75e9
"""SM clock, Hz, of a kernel too short to reach the power limit (256×4096×4096 in 15.7 µs)."""
CLOCK_SUSTAINED = 1.38e9
"""SM clock, Hz, at which large products run under 700 W: BF16 peaks at 650-745 TFLOP/s, FP8 at
1541, of the 989 and 1979 that the boost clock would give."""
POWER_LIMITED_FLOPS = 60e9
"""Work, in 16-bit FLOP, at which a kernel is half-way between the two clocks."""

INGEST_BYTES_PER_CLOCK = 96.0
"""What one SM takes from L2 per clock when few do: 512×512×8192 on 64 blocks of 64×64×64 took
16.4 µs, 167 GB/s an SM."""
L2_BYTES_PER_CLOCK = 9900.0
"""What all SMs together take from L2 per clock. 256×4096×14336 on 128 blocks of 64×128×64 (24 KiB
a K tile) took 46.8 µs: 15.5 TB/s, well below what the tensor cores could do."""
MEMORY_BANDWIDTH = 4.1e12
"""Bytes per second that small-M products draw from an H200's memory."""
MEMORY_EFFICIENCY = 0.85
"""Share of a device's peak bandwidth, if that is known: 4.1 of 4.8 TB/s on the H200."""
BLOCK_MEMORY_BANDWIDTH = 80e9
"""Bytes per second one SM draws from device memory: latency bounds what it has in flight.
16×4096×4096 on 64 blocks: 59 GB/s each, launch included."""
L2_USABLE = 0.55
"""Share of L2 that holds operands for reuse: two partitions mirror part of their contents."""

TILE_SWITCH_US = 0.15
"""What remains of a tile's epilogue when ping-pong overlaps it with the next tile's products."""
MEMSET_US = 2.0
"""Zeroing the stream-K scheduler's barriers before each launch: about 2 µs of a 10 µs problem."""
REDUCE_BYTES_PER_CLOCK = 32.0
"""FP32 partials one SM adds to a workspace tile per clock; splits of a tile take turns."""
CLUSTER_REDUCE_US = 1.0
"""A cluster adding up its blocks' sums through each other's shared memory. A guess."""
REDUCE_LAUNCH_US = 1.2
"""The second kernel of a split-K product, beyond the first one's tail; cuBLAS's take 1.7 to 2.5."""
L2_BANDWIDTH = 5.5e12
"""Bytes per second of partials written to L2 and read back."""

_MOST_ROWS = 1 << 16
"""Rows of numbers that are kept; beyond, all are made again. Some 10 MB."""


class Choices(NamedTuple, Generic[N]):
    """A launch in numbers."""

    along_m: N
    raster_heuristic: N
    swizzle: N
    split_k: N
    stream_k: N
    splits: N


class Sizes(NamedTuple):
    """A problem in numbers."""

    m: float
    n: float
    k: float
    batch: float
    clock: float  # Hz
    copies_us: float  # of operands that TMA cannot read
    a_bytes: float  # of one matrix
    b_bytes: float
    row_bytes: float  # of A along K
    once_bytes: float  # A and B of all batches
    d_bytes: float
    slice_bytes: float  # one split's partials, written and read back
    symmetric: bool


class _Grid(NamedTuple):
    """`gemmsmith.core.tiles.TileGrid` of every candidate."""

    tiles_m: Column
    tiles_n: Column
    tiles: Column
    k_tiles: Column
    resident: Column  # blocks at once, in clusters along M and N


class _Work(NamedTuple):
    """What a candidate's busiest block does."""

    blocks: Column  # that work at once
    tiles: Column  # one after the other
    k_tiles: Column  # of all these tiles
    extra_us: Column  # for what splits K


def predicted_us(
    problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
) -> list[float]:
    """Microseconds per launch, by waves, instruction rates and bytes moved; in the same order.

    NumPy is loaded when something is predicted: measured answers need none.
    """
    if not candidates:
        return []
    import numpy

    kernel = Features(*_KERNELS.columns(candidates))
    launch = Choices(*_LAUNCHES.columns(candidates))
    sizes = sizes_of(problem)
    grid = _grid(kernel, sizes, device)
    work = _work(kernel, launch, grid, sizes, device)
    rate = numpy.minimum(INGEST_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK / work.blocks)
    # The two overlap, but not perfectly where they are equal.
    k_tile_us = _both(kernel.compute_clocks, kernel.ingest_bytes / rate) / sizes.clock * 1e6
    store_us = kernel.store_clocks / sizes.clock * 1e6
    switch_us = numpy.where(kernel.overlapped, TILE_SWITCH_US, EPILOGUE_US + store_us)
    compute_us = (
        work.k_tiles * k_tile_us + store_us + numpy.maximum(work.tiles - 1, 0.0) * switch_us
    )
    moved = _read_bytes(kernel, launch, grid, sizes, device) + sizes.d_bytes
    bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY or MEMORY_BANDWIDTH
    memory_us = moved / numpy.minimum(bandwidth, work.blocks * BLOCK_MEMORY_BANDWIDTH) * 1e6
    fixed_us = kernel.fixed_us + kernel.padded * sizes.copies_us
    # The slower one sets the pace; if both are close, each delays the other.
    times: list[float] = (fixed_us + work.extra_us + _both(compute_us, memory_us)).tolist()
    return times


def _both(a: Column, b: Column) -> Column:
    """The time of two activities side by side that slow each other: their 6-norm."""
    a, b = a * a * a, b * b * b
    return (a * a + b * b) ** (1 / 6)


def _described(kernel: AnyKernel) -> Features[float]:
    return features(kernel) or UNKNOWN


def sizes_of(problem: Problem) -> Sizes:
    """The problem in numbers; for a grouped one, the sizes of a group with an even share."""
    product, operation = products(problem), problem.operation
    row = product.k * operation.a.bytes
    of_d = 1 + operation.epilogue.matrices  # D and the epilogue's operands of its size
    columns = product.n // 2 if operation.epilogue.is_gated else product.n
    a, b = float(product.m * row), 0.0 if operation.symmetric else float(product.n * row)
    return Sizes(
        m=product.m,
        n=product.n,
        k=product.k,
        batch=product.number,
        clock=_clock(problem),
        copies_us=_copies_us(problem),
        a_bytes=a,
        b_bytes=b,
        row_bytes=row,
        once_bytes=(a + b) * product.number,
        d_bytes=product.m * columns * operation.d.bytes * product.number * of_d,
        slice_bytes=2 * 4 * product.m * product.n,
        symmetric=operation.symmetric,
    )


def _choices(launch: Launch) -> Choices[float]:
    return Choices(
        along_m=launch.raster is RasterOrder.ALONG_M,
        raster_heuristic=launch.raster is RasterOrder.HEURISTIC,
        swizzle=launch.swizzle,
        split_k=launch.decomposition is Decomposition.SPLIT_K,
        stream_k=launch.decomposition is Decomposition.STREAM_K,
        splits=launch.splits,
    )


class _Rows:
    """What candidates come down to in numbers: a row for each key, read in columns.

    Rows are made once: looking up hundreds of them and turning them into arrays takes a few dozen
    microseconds, and describing a single candidate takes as long. Threads may share an object.

    Args:
        key: two candidates with the same key have the same numbers.
        describe: the numbers, always as many, of a candidate.
    """

    def __init__(
        self, key: Callable[[Candidate], Hashable], describe: Callable[[Candidate], Sequence[float]]
    ) -> None:
        self._key = key
        self._describe = describe
        self._lock = threading.Lock()
        self._places: dict[Hashable, int] = {}
        self._values: Column  # a column for each row

    def columns(self, candidates: Sequence[Candidate]) -> Column:
        """A column for each number, with an entry for each candidate; there must be some."""
        keys = list(map(self._key, candidates))
        with self._lock:
            try:
                places = list(map(self._places.__getitem__, keys))
            except KeyError:
                self._add(dict(zip(keys, candidates, strict=True)))
                places = list(map(self._places.__getitem__, keys))
            return self._values.take(places, axis=1)

    def _add(self, candidates: dict[Hashable, Candidate]) -> None:
        import numpy

        if len(self._places) > _MOST_ROWS:
            self._places.clear()
        new = {key: item for key, item in candidates.items() if key not in self._places}
        made = numpy.array([self._describe(item) for item in new.values()], dtype=float).T
        self._values = numpy.concatenate([self._values, made], axis=1) if self._places else made
        for key in new:
            self._places[key] = len(self._places)


_KERNELS = _Rows(attrgetter("kernel.name"), lambda candidate: _described(candidate.kernel))
_LAUNCHES = _Rows(attrgetter("launch"), lambda candidate: _choices(candidate.launch))


def _clock(problem: Problem) -> float:
    work = problem.flops * problem.operation.a.bits / 16
    share = work / (work + POWER_LIMITED_FLOPS)
    return CLOCK_BURST + (CLOCK_SUSTAINED - CLOCK_BURST) * share


def _copies_us(problem: Problem) -> float:
    """Copying operands that TMA cannot read: read and written once."""
    width = problem.operation.a.bytes
    copied = sum(
        2 * extents * problem.k * problem.batch * width
        for extents, contiguous in (
            (problem.m, problem.contiguous_a),
            (problem.n, problem.contiguous_b),
        )
        if contiguous * width % 16
    )
    return REDUCE_LAUNCH_US + copied / MEMORY_BANDWIDTH * 1e6


def _grid(kernel: Features[Column], sizes: Sizes, device: DeviceModel) -> _Grid:
    import numpy

    m = numpy.where(kernel.swapped, sizes.n, sizes.m)
    n = numpy.where(kernel.swapped, sizes.m, sizes.n)
    tiles_m = padded_tiles(m, kernel.tile_m, kernel.cluster_m)
    tiles_n = padded_tiles(n, kernel.tile_n, kernel.cluster_n)
    tiles = tiles_m * tiles_n
    if sizes.symmetric:
        choices = (kernel.tile_m, kernel.tile_n, kernel.cluster_m, kernel.cluster_n)
        tiles = numpy.array(
            [
                triangle_tiles(int(sizes.m), (rows, columns), (down, across))
                for rows, columns, down, across in zip(*map(_integers, choices), strict=True)
            ],
            dtype=float,
        )
    return _Grid(
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        tiles=tiles * sizes.batch,
        k_tiles=-(-sizes.k // kernel.tile_k),
        resident=_resident(kernel.cluster_m * kernel.cluster_n, device),
    )


def _integers(column: Column) -> list[int]:
    integers: list[int] = column.astype(int).tolist()
    return integers


def _resident(clusters: Column, device: DeviceModel) -> Column:
    """Blocks that run at once, in clusters of that many."""
    import numpy

    sizes = clusters.astype(int)
    arch = architecture(device.arch)
    blocks = [arch.resident_blocks(device.sm_count, size) for size in range(1, sizes.max() + 1)]
    resident: Column = numpy.array(blocks, dtype=float)[sizes - 1]
    return resident


def _work(
    kernel: Features[Column],
    launch: Choices[Column],
    grid: _Grid,
    sizes: Sizes,
    device: DeviceModel,
) -> _Work:
    import numpy

    stream_k = launch.stream_k > 0
    in_cluster = ~stream_k & (kernel.cluster_split > 0)
    sliced = ~stream_k & (kernel.sliced > 0)
    in_turn = (launch.split_k > 0) & (launch.splits > 1) & ~in_cluster & ~sliced
    splits = numpy.where(in_cluster | sliced | in_turn, launch.splits, 1.0)
    resident = grid.resident
    if in_cluster.any():
        resident = numpy.where(in_cluster, _resident(splits, device), resident)
    units = grid.tiles * splits
    waves = numpy.ceil(units / resident)
    # Whole waves of whole tiles; with stream-K an even share of them all.
    tiles = numpy.where(stream_k, grid.tiles / resident, waves)
    partial_bytes = kernel.tile_m * kernel.tile_n * 4
    partial_us = partial_bytes / REDUCE_BYTES_PER_CLOCK / sizes.clock * 1e6
    slices_us = sizes.slice_bytes * splits / L2_BANDWIDTH * 1e6
    # The blocks that share a tile with stream-K add to it in turn: one begins it, another ends it.
    sharing = numpy.where(stream_k, numpy.maximum(2.0, resident / grid.tiles), splits)
    return _Work(
        blocks=numpy.where(stream_k, resident, numpy.minimum(units, resident)),
        tiles=tiles,
        k_tiles=tiles * numpy.where(stream_k, grid.k_tiles, numpy.ceil(grid.k_tiles / splits)),
        extra_us=in_cluster * (CLUSTER_REDUCE_US + CLUSTER_SYNC_US)
        + sliced * (REDUCE_LAUNCH_US + slices_us)
        + (stream_k | in_turn) * (MEMSET_US + sharing * partial_us),
    )


def _read_bytes(
    kernel: Features[Column],
    launch: Choices[Column],
    grid: _Grid,
    sizes: Sizes,
    device: DeviceModel,
) -> Column:
    """Operand bytes from device memory: each byte once, and again if L2 lost it between waves."""
    import numpy

    a, b, row, once = sizes.a_bytes, sizes.b_bytes, sizes.row_bytes, sizes.once_bytes
    usable = device.l2_bytes * L2_USABLE
    if a + b <= usable:
        return numpy.broadcast_to(once, grid.tiles.shape)
    along_m = (launch.along_m > 0) | (
        (launch.raster_heuristic > 0) & (grid.tiles_n > grid.tiles_m)  # `grid.heuristic_raster`
    )
    # A wave is a band: `swizzle` clusters wide across, as long as it needs to be along.
    side = numpy.where(along_m, kernel.cluster_n, kernel.cluster_m)
    across = numpy.minimum(launch.swizzle * side, numpy.where(along_m, grid.tiles_n, grid.tiles_m))
    along = numpy.where(along_m, grid.tiles_m, grid.tiles_n)
    length = numpy.minimum(along, numpy.maximum(1.0, grid.resident // across))
    bands = numpy.maximum(1.0, grid.resident // (length * across))
    # The operand that the band keeps while it moves along is read once per band, not per wave.
    keeps_a = along_m == (kernel.swapped > 0)
    all_kept, all_moved = numpy.where(keeps_a, a, b), numpy.where(keeps_a, b, a)
    kept_tile = numpy.where(along_m, kernel.tile_n, kernel.tile_m)
    moved_tile = numpy.where(along_m, kernel.tile_m, kernel.tile_n)
    kept = numpy.minimum(all_kept, across * bands * kept_tile * row)
    moved = numpy.minimum(all_moved, length * moved_tile * row)
    waves = grid.tiles_m * grid.tiles_n / grid.resident
    kept_again = numpy.maximum(all_kept, numpy.minimum(kept * waves, all_kept * along / length))
    # The other operand comes again for each band, unless all of it stays in L2.
    moved_again = numpy.maximum(
        all_moved, numpy.minimum(moved * waves, all_moved * numpy.maximum(1.0, waves))
    )
    read = numpy.where(kept > usable, kept_again, all_kept) + numpy.where(
        all_moved + kept > usable, moved_again, all_moved
    )
    return numpy.where(waves <= 1, once, read * sizes.batch)
