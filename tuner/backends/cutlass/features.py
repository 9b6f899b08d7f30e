"""What the analytic cost model knows of a CUTLASS kernel: its tile, its latencies, its pace.

Numbers are effective rates fitted to few measurements on one NVIDIA H200 (2026-11-20, BF16 `tn`),
rounded; each constant says which. Of architectures that were not measured only the order of
magnitude is right.
"""

from __future__ import annotations

from math import ceil

from gemmsmith.core.epilogue import Activation
from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.arch import SM90, architecture
from tuner.backends.backend import Features
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import is_padded, operands

LAUNCH_US = 2.2
"""Start of a kernel until the first instruction, and its drain."""
PERSISTENT_US = 0.3
"""What a persistent kernel takes more than one with a block per tile, for the same tiles:
128×112×64 at 256×7168×2048 and 1024×1792×768 (NVIDIA H200, 2026-11-21)."""
PROLOGUE_US = 0.9
"""Barriers, descriptors, and the first tiles' way through an empty pipeline."""
EPILOGUE_US = 0.7
"""Latency from the last product until the tile's stores have left."""
CLUSTER_SYNC_US = 0.25
"""Clusters start together and release their stages together; seen at one tile a block, where
1×1 won (256×4096×4096)."""
STORE_BYTES_PER_CLOCK = 48.0
"""What one SM stores per clock, conversion and staging through shared memory included."""

PRECISE_FP8 = 1.18
"""Cost of promoting FP8 partial sums to FP32 registers, relative to fast accumulation."""
MULTICAST_GAIN = 0.04
"""Of the mainloop's time under the power limit, per halving of what a tile reads from L2: the
large winners have clusters of 2 throughout."""
NARROW_SWIZZLE = 1.4
"""Cost of a tile whose operand is contiguous along M or N but does not fill 128-byte rows there:
its shared memory has a narrower swizzle. 2304×768×4096 `nt` in tiles of 112 and 240 took 36 to
50 µs, 23.5 in tiles of 128 (NVIDIA H200, 2026-11-21)."""
CLUSTER_SPLIT_RATE = 0.85
"""Of the others' mainloop rate, what our cluster split-K kernels reach: without it, 176 took 1.17
times as long as predicted, at the median (34 recorded problems, NVIDIA H200, 2026-11-21)."""
ODD_TILE = 1.15
"""Cost of products in tiles whose N is an odd multiple of 8: without it, 67 kernels took 1.07 to
1.10 times as long as predicted, launch and all, those in multiples of 32 0.99 (as above)."""
CPASYNC_INGEST = 0.45
"""Of TMA's ingest, what producer warps reach with cp.async of 16 bytes (less, the less aligned)."""
MULTISTAGE_RATE = 0.25
"""Of `wgmma`'s rate, what CUTLASS 2.x reaches with element-wise loads and two stages."""
ACTIVATION_CLOCKS = {
    Activation.GELU_TANH: 1 / 16,
    Activation.GELU: 1 / 8,
    Activation.SILU: 1 / 8,
    Activation.RELU2: 1 / 64,
}
"""What an SM takes for one element, by counts of instructions: 16 approximations of a function or
128 others a clock. Not measured."""


def features(kernel: CutlassKernel) -> Features[float]:
    """What the analytic cost model knows of a kernel."""
    m, n, k = kernel.tile
    one_each = kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
    if one_each or kernel.scheduler is TileScheduler.GRID:  # a block per tile, or per slice
        shared = max(footprint.shared_bytes(kernel), 1)
        per_sm = max(1, min(4, architecture(kernel.arch).shared_bytes // shared))
    else:
        per_sm = 1
    fixed = LAUNCH_US + PROLOGUE_US + EPILOGUE_US
    if kernel.mainloop in (MainloopSchedule.PINGPONG, MainloopSchedule.COOPERATIVE):
        fixed += PERSISTENT_US
    if kernel.cluster != (1, 1):
        fixed += CLUSTER_SYNC_US
    compute, ingest = _k_tile(kernel)
    return Features(
        tile_m=m,
        tile_n=n,
        tile_k=k,
        cluster_m=kernel.cluster[0],
        cluster_n=kernel.cluster[1],
        swapped=kernel.swapped,
        sliced=kernel.scheduler is TileScheduler.SPLIT_K,
        cluster_split=kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K,
        padded=is_padded(kernel),
        overlapped=kernel.mainloop is MainloopSchedule.PINGPONG or per_sm > 1,
        fixed_us=fixed,
        compute_clocks=compute,
        ingest_bytes=ingest,
        store_clocks=m * n * _element_clocks(kernel.operation),
    )


def _element_clocks(operation: Operation) -> float:
    """What an SM takes from an element's sum until it is stored; two of gated ones make one."""
    moved = operation.d.bytes * (1 + operation.epilogue.matrices)
    epilogue = operation.epilogue
    activation = epilogue.backward.activation if epilogue.backward else epilogue.activation
    clocks = moved / STORE_BYTES_PER_CLOCK + (ACTIVATION_CLOCKS[activation] if activation else 0.0)
    return clocks / 2 if epilogue.is_gated else clocks


def _k_tile(kernel: CutlassKernel) -> tuple[float, float]:
    """One K tile of one output tile on one SM: tensor-core clocks, and bytes to copy for them."""
    m, n, k = kernel.tile
    bits = kernel.operation.a.bits
    arch = architecture(kernel.arch)
    if arch is SM90:
        instructions = ceil(m / 64) * k * bits / 256
        # wgmma 64×N×(256 bits): N/2 clocks of tensor core, unless reading A and B from shared
        # memory at 128 bytes a clock takes longer (N < 64).
        compute = instructions * max(n / 2, 16 + n / 4)
    else:
        compute = 2 * m * n * k / arch.peak_flops_per_clock(bits)
    if kernel.operation.is_narrow_float and not kernel.fast_accumulation:
        compute *= PRECISE_FP8
    ingest = float(footprint.stage_bytes(kernel))
    seen = operands(kernel.operation, swapped=kernel.swapped)
    along_m = 0 if seen.a_row_major else m
    along_n = n if seen.b_row_major else 0
    if any(extent * bits % 1024 for extent in (along_m, along_n)):
        compute *= NARROW_SWIZZLE
    compute *= ODD_TILE if n > 8 and n % 16 else 1
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        compute, ingest = compute / CLUSTER_SPLIT_RATE, ingest / CLUSTER_SPLIT_RATE
    if kernel.mainloop is MainloopSchedule.MULTISTAGE and arch is SM90:
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
