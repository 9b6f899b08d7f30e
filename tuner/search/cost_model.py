"""An analytic model of a GEMM's time: enough to order candidates, not to time them.

A kernel's time is taken as launch overhead plus the slowest of three: what its busiest SM computes
and loads, what comes from device memory, and the fixed latencies in between. Numbers are
effective rates fitted to few measurements on one NVIDIA H200 (2026-11-20, BF16 `tn`), rounded;
each constant says which. Pure arithmetic: no input or output, the same answer every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from gemmsmith.device import DeviceModel
from gemmsmith.kernel import Kernel, MainloopSchedule, TileScheduler
from gemmsmith.launch import Candidate, Decomposition, Launch, RasterOrder
from gemmsmith.problem import Problem
from tuner.space import footprint
from tuner.space.grid import TileGrid, heuristic_raster, resident_blocks, tile_grid
from tuner.space.operation import is_padded, operands

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
"""Of a device's peak bandwidth, where that is known: 4.1 of 4.8 TB/s on the H200."""
BLOCK_MEMORY_BANDWIDTH = 80e9
"""Bytes per second one SM draws from device memory: latency bounds what it has in flight.
16×4096×4096 on 64 blocks: 59 GB/s each, launch included."""
L2_USABLE = 0.55
"""Share of L2 that holds operands for reuse: two partitions mirror part of their contents."""

LAUNCH_US = 2.2
"""Start of a kernel until the first instruction, and its drain."""
PERSISTENT_US = 0.3
"""What a persistent kernel takes more than one with a block per tile, for the same tiles:
128×112×64 at 256×7168×2048 and 1024×1792×768 (NVIDIA H200, 2026-11-21)."""
PROLOGUE_US = 0.9
"""Barriers, descriptors, and the first tiles' way through an empty pipeline."""
EPILOGUE_US = 0.7
"""Latency from the last product until the tile's stores have left."""
STORE_BYTES_PER_CLOCK = 48.0
"""What one SM stores per clock, conversion and staging through shared memory included."""
TILE_SWITCH_US = 0.15
"""What remains of a tile's epilogue when ping-pong overlaps it with the next tile's products."""
MEMSET_US = 2.0
"""Zeroing the stream-K scheduler's barriers before each launch: about 2 µs of a 10 µs problem."""
REDUCE_BYTES_PER_CLOCK = 32.0
"""FP32 partials one SM adds to a workspace tile per clock; splits of a tile take turns."""
CLUSTER_REDUCE_US = 1.0
"""A cluster adding up its blocks' sums through each other's shared memory. A guess."""
REDUCE_LAUNCH_US = 1.2
"""The second kernel of a split-K product, after what overlaps the first one's tail: cuBLAS's
take 1.7 to 2.5 µs in all."""
L2_BANDWIDTH = 5.5e12
"""Bytes per second of partials written to L2 and read back."""

PRECISE_FP8 = 1.18
"""Cost of promoting FP8 partial sums to FP32 registers, relative to fast accumulation."""
MULTICAST_GAIN = 0.04
"""Of the mainloop's time under the power limit, per halving of what a tile reads from L2: the
large winners have clusters of 2 throughout."""
CLUSTER_SYNC_US = 0.25
"""Clusters start together and release their stages together; seen at one tile a block, where
1×1 won (256×4096×4096)."""
NARROW_SWIZZLE = 1.4
"""Cost of a tile whose operand is contiguous along M or N but does not fill 128-byte rows there:
its shared memory has a narrower swizzle. 2304×768×4096 `nt` in tiles of 112 and 240 took 36 to
50 µs, 23.5 in tiles of 128 (NVIDIA H200, 2026-11-21)."""
CPASYNC_INGEST = 0.45
"""Of TMA's ingest, what producer warps reach with cp.async of 16 bytes (less, the less aligned)."""
MULTISTAGE_RATE = 0.25
"""Of `wgmma`'s rate, what CUTLASS 2.x reaches with element-wise loads and two stages."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """What depends on the kernel only: computed once for all problems."""

    compute_clocks: float  # tensor cores, one K tile
    ingest_bytes: float  # copies into shared memory, one K tile, as TMA would do them
    store_clocks: float  # of one output tile
    overlapped: bool
    padded: bool


@dataclass(frozen=True, slots=True)
class _Setting:
    """What depends on the problem and the device only: shared by all kernels."""

    clock: float  # Hz
    bandwidth: float  # bytes per second of device memory
    l2_usable: float  # bytes
    a_bytes: int  # one batch of A
    b_bytes: int
    written_bytes: int  # all batches of D


class _Costs(NamedTuple):
    """What depends on the kernel and the problem only: shared by all launches."""

    traits: _Traits
    setting: _Setting
    grid: TileGrid
    tiles: int
    resident: int
    fixed_us: float
    store_us: float  # of one output tile
    switch_us: float  # from one tile of a block to the next
    read_bytes: float | None  # None where L2 loses operands between waves: then the launch decides


class AnalyticModel:
    """Predicts microseconds per launch from waves, instruction rates and bytes moved."""

    def predict(
        self, problem: Problem, candidates: Sequence[Candidate], device: DeviceModel
    ) -> list[float]:
        """Predicted microseconds per launch, one for each candidate, in their order."""
        setting = _setting(problem, device)
        costs: dict[str, _Costs] = {}
        times = []
        for candidate in candidates:
            kernel = candidate.kernel
            cost = costs.get(kernel.name)
            if cost is None:
                cost = costs[kernel.name] = _costs(kernel, problem, device, setting)
            times.append(_time(kernel, candidate.launch, cost, problem, device))
        return times


def _clock(problem: Problem) -> float:
    work = problem.flops / (2 if problem.dtype.is_fp8 else 1)
    share = work / (work + POWER_LIMITED_FLOPS)
    return CLOCK_BURST + (CLOCK_SUSTAINED - CLOCK_BURST) * share


def _setting(problem: Problem, device: DeviceModel) -> _Setting:
    width = problem.dtype.a.bytes
    return _Setting(
        clock=_clock(problem),
        bandwidth=device.memory_bandwidth * MEMORY_EFFICIENCY or MEMORY_BANDWIDTH,
        l2_usable=device.l2_bytes * L2_USABLE,
        a_bytes=problem.m * problem.k * width,
        b_bytes=problem.n * problem.k * width,
        written_bytes=problem.m * problem.n * problem.dtype.d.bytes * problem.batch,
    )


def _costs(kernel: Kernel, problem: Problem, device: DeviceModel, setting: _Setting) -> _Costs:
    traits = _traits(kernel)
    grid = tile_grid(kernel, problem)
    resident = resident_blocks(device.sm_count, kernel.cluster[0] * kernel.cluster[1])
    fixed = LAUNCH_US + PROLOGUE_US + EPILOGUE_US
    if traits.padded:
        fixed += _copies_us(problem)
    if kernel.mainloop in (MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE):
        fixed += PERSISTENT_US
    if kernel.cluster != (1, 1):
        fixed += CLUSTER_SYNC_US
    store = traits.store_clocks / setting.clock * 1e6
    once = setting.a_bytes + setting.b_bytes
    kept = once <= setting.l2_usable or grid.tiles_m * grid.tiles_n <= resident
    return _Costs(
        traits=traits,
        setting=setting,
        grid=grid,
        tiles=grid.tiles,
        resident=resident,
        fixed_us=fixed,
        store_us=store,
        switch_us=TILE_SWITCH_US if traits.overlapped else EPILOGUE_US + store,
        read_bytes=float(once * problem.batch) if kept else None,
    )


@lru_cache(maxsize=16384)
def _traits(kernel: Kernel) -> _Traits:
    m, n, _ = kernel.tile
    one_each = kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
    if one_each or kernel.scheduler is TileScheduler.GRID:  # a block per tile, or per slice
        shared = max(footprint.shared_bytes(kernel), 1)
        per_sm = max(1, min(4, footprint.SHARED_MEMORY_BYTES // shared))
    else:
        per_sm = 1
    compute, ingest = _k_tile(kernel)
    return _Traits(
        compute_clocks=compute,
        ingest_bytes=ingest,
        store_clocks=m * n * kernel.dtype.d.bytes / STORE_BYTES_PER_CLOCK,
        overlapped=kernel.mainloop is MainloopSchedule.PINGPONG or per_sm > 1,
        padded=is_padded(kernel),
    )


def _copies_us(problem: Problem) -> float:
    """Copying operands that TMA cannot read: read and written once."""
    width = problem.dtype.a.bytes
    copied = sum(
        2 * extents * problem.k * problem.batch * width
        for extents, contiguous in (
            (problem.m, problem.contiguous_a),
            (problem.n, problem.contiguous_b),
        )
        if contiguous * width % 16
    )
    return REDUCE_LAUNCH_US + copied / MEMORY_BANDWIDTH * 1e6


def _k_tile(kernel: Kernel) -> tuple[float, float]:
    """One K tile of one output tile on one SM: tensor-core clocks, and bytes to copy for them."""
    m, n, k = kernel.tile
    bits = kernel.dtype.a.bits
    instructions = ceil(m / 64) * k * bits / 256
    # wgmma 64×N×(256 bits): N/2 clocks of tensor core, unless reading A and B from shared memory
    # at 128 bytes a clock takes longer (N < 64).
    compute = instructions * max(n / 2, 16 + n / 4)
    if kernel.dtype.is_fp8 and not kernel.fast_accumulation:
        compute *= PRECISE_FP8
    ingest = float(footprint.stage_bytes(kernel))
    seen = operands(kernel.dtype, kernel.layout, swapped=kernel.swapped)
    along_m = 0 if seen.a_row_major else m
    along_n = n if seen.b_row_major else 0
    if any(extent * bits % 1024 for extent in (along_m, along_n)):
        compute *= NARROW_SWIZZLE
    if kernel.mainloop is MainloopSchedule.MULTISTAGE:
        compute /= MULTISTAGE_RATE
        ingest /= MULTISTAGE_RATE
    elif kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        width = kernel.alignment_a * bits / 128
        ingest /= CPASYNC_INGEST * width**0.5
    cluster_m, cluster_n = kernel.cluster
    # L2 reads left after multicast: A is shared along the cluster's N, B along its M.
    read = (m / cluster_n + n / cluster_m) / (m * n)
    compute *= 1 + MULTICAST_GAIN * read * 128
    return compute, ingest


def _k_tile_us(cost: _Costs, blocks: int) -> float:
    rate = min(INGEST_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK / blocks)
    ingest = cost.traits.ingest_bytes / rate
    # The two overlap, but not perfectly where they are equal.
    return float((cost.traits.compute_clocks**6 + ingest**6) ** (1 / 6) / cost.setting.clock * 1e6)


def _time(
    kernel: Kernel, launch: Launch, cost: _Costs, problem: Problem, device: DeviceModel
) -> float:
    grid, all_tiles, resident = cost.grid, cost.tiles, cost.resident
    extra = 0.0
    if launch.decomposition is Decomposition.STREAM_K:
        blocks = resident
        work = all_tiles * grid.k_tiles / resident
        tiles = all_tiles / resident
        # The blocks that share a tile add to it in turn; at least one began it, another ends it.
        extra = MEMSET_US + max(2.0, resident / all_tiles) * _partial_us(kernel, cost)
    elif kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        resident = resident_blocks(device.sm_count, launch.splits)
        blocks = min(all_tiles * launch.splits, resident)
        waves = ceil(all_tiles * launch.splits / resident)
        work = waves * ceil(grid.k_tiles / launch.splits)
        tiles = float(waves)
        extra = CLUSTER_REDUCE_US + CLUSTER_SYNC_US
    elif kernel.scheduler is TileScheduler.SPLIT_K:
        units = all_tiles * launch.splits
        blocks = min(units, resident)
        waves = ceil(units / resident)
        work = waves * ceil(grid.k_tiles / launch.splits)
        tiles = float(waves)
        partials = 2 * 4 * problem.m * problem.n * launch.splits
        extra = REDUCE_LAUNCH_US + partials / L2_BANDWIDTH * 1e6
    elif launch.decomposition is Decomposition.SPLIT_K and launch.splits > 1:
        units = all_tiles * launch.splits
        blocks = min(units, resident)
        waves = ceil(units / resident)
        work = waves * ceil(grid.k_tiles / launch.splits)
        tiles = float(waves)
        extra = MEMSET_US + launch.splits * _partial_us(kernel, cost)
    else:
        blocks = min(all_tiles, resident)
        waves = ceil(all_tiles / resident)
        work = waves * grid.k_tiles
        tiles = float(waves)
    compute = work * _k_tile_us(cost, blocks) + cost.store_us + max(tiles - 1, 0.0) * cost.switch_us
    memory = _memory_us(kernel, launch, cost, problem, blocks)
    # Whichever is slower sets the pace; where they are close, each delays the other.
    return float(cost.fixed_us + extra + (compute**6 + memory**6) ** (1 / 6))


def _partial_us(kernel: Kernel, cost: _Costs) -> float:
    m, n, _ = kernel.tile
    return m * n * 4 / REDUCE_BYTES_PER_CLOCK / cost.setting.clock * 1e6


def _memory_us(
    kernel: Kernel, launch: Launch, cost: _Costs, problem: Problem, blocks: int
) -> float:
    setting = cost.setting
    read = cost.read_bytes
    if read is None:
        read = _read_again_bytes(kernel, launch, cost, problem)
    paced = min(setting.bandwidth, blocks * BLOCK_MEMORY_BANDWIDTH)
    return (read + setting.written_bytes) / paced * 1e6


def _read_again_bytes(kernel: Kernel, launch: Launch, cost: _Costs, problem: Problem) -> float:
    """Operand bytes from device memory: once each, and again for what L2 lost between waves."""
    grid, resident, setting = cost.grid, cost.resident, cost.setting
    a, b = setting.a_bytes, setting.b_bytes
    usable = setting.l2_usable
    per_batch = grid.tiles_m * grid.tiles_n
    width = problem.dtype.a.bytes
    if kernel.swapped:
        a, b = b, a
    raster = launch.raster
    if raster is RasterOrder.HEURISTIC:
        raster = heuristic_raster(grid)
    cluster_m, cluster_n = kernel.cluster
    # A wave is a band: `swizzle` clusters wide across, as long as it needs to be along.
    if raster is RasterOrder.ALONG_N:
        across, along = min(launch.swizzle * cluster_m, grid.tiles_m), grid.tiles_n
    else:
        across, along = min(launch.swizzle * cluster_n, grid.tiles_n), grid.tiles_m
    length = min(along, max(1, resident // across))
    bands = max(1, resident // (length * across))
    rows, columns = across * bands, length
    if raster is RasterOrder.ALONG_M:
        rows, columns = columns, rows
    waves = per_batch / resident
    tile_m, tile_n, _ = kernel.tile
    wave_a = min(a, rows * tile_m * problem.k * width)
    wave_b = min(b, columns * tile_n * problem.k * width)
    # The operand that the band keeps while it moves along is read once per band, not per wave.
    kept_a = raster is RasterOrder.ALONG_N
    kept, moved = (wave_a, wave_b) if kept_a else (wave_b, wave_a)
    kept_all, moved_all = (float(a), float(b)) if kept_a else (float(b), float(a))
    if kept > usable:
        kept_all = max(kept_all, min(kept * waves, kept_all * along / length))
    # The other operand comes again for each band, unless all of it stays in L2.
    if moved_all + kept > usable:
        moved_all = max(moved_all, min(moved * waves, moved_all * max(1.0, waves)))
    return float((kept_all + moved_all) * problem.batch)
