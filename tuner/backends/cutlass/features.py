"""The cost model's description of a CUTLASS kernel: its tile, latencies and rates.

The constants are effective rates fitted to a few measurements on one NVIDIA H200 (2026-11-20, BF16
`tn`), rounded; each says to which. For other architectures only the order of magnitude is right.
"""

from __future__ import annotations

from math import ceil

from gemmsmith.core.kernel import CutlassKernel, MainloopSchedule, TileScheduler
from gemmsmith.core.operation import Operation
from tuner.arch import SM90, architecture
from tuner.backends.backend import Features
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.operation import is_padded, operands

LAUNCH_US = 2.2
"""From a kernel's start to its first instruction, and from its last instruction to its end."""
PERSISTENT_US = 0.3
"""Additional time of a persistent kernel over a kernel with one block per tile, for the same tiles:
128×112×64 at 256×7168×2048 and 1024×1792×768 (NVIDIA H200, 2026-11-21)."""
PROLOGUE_US = 0.9
"""Barriers, descriptors, and the first tiles' loads into an empty pipeline."""
EPILOGUE_US = 0.7
"""Latency from the last product to the end of the tile's stores."""
CLUSTER_SYNC_US = 0.25
"""The blocks of a cluster start together and release their stages together. Measured with one tile
per block, where a cluster of 1×1 won (256×4096×4096)."""
STORE_BYTES_PER_CLOCK = 48.0
"""Bytes that one SM stores per clock, including conversion and staging in shared memory."""

PRECISE_FP8 = 1.18
"""Factor on FP8 products whose partial sums are promoted to FP32 registers."""
MULTICAST_GAIN = 0.04
"""Share of the mainloop's time, at the power limit, that is saved each time a tile's reads from L2
are halved: all large winners have clusters of 2."""
NARROW_SWIZZLE = 1.4
"""Factor on tiles whose operand is contiguous along M or N but does not fill 128-byte rows there:
its shared memory has a narrower swizzle. 2304×768×4096 `nt` in tiles of 112 and 240 took 36 to
50 µs, in tiles of 128 23.5 µs (NVIDIA H200, 2026-11-21)."""
CLUSTER_SPLIT_RATE = 0.85
"""Mainloop rate of our cluster split-K kernels, relative to CUTLASS's kernels: without it, the
median of 176 kernels took 1.17 times as long as predicted (34 recorded problems, NVIDIA H200,
2026-11-21)."""
ODD_TILE = 1.15
"""Factor on products in tiles whose N is an odd multiple of 8: without it, 67 kernels took 1.07 to
1.10 times as long as predicted, including the launch; kernels with multiples of 32 took 0.99 times
as long (as above)."""
CPASYNC_INGEST = 0.45
"""Rate of producer warps with `cp.async` of 16 bytes, relative to TMA; less with less alignment."""
MULTISTAGE_RATE = 0.25
"""Rate of CUTLASS 2.x with element-wise loads and two stages, relative to `wgmma`."""
APPROXIMATION_CLOCKS, SIMPLE_CLOCKS = 1 / 16, 1 / 64
"""Clocks of one SM for one element's activation: for each approximation of a function, and of an
activation without any. Counted, not measured: an SM executes 16 approximations or 128 other
instructions per clock."""


def features(kernel: CutlassKernel) -> Features[float]:
    """The cost model's description of a kernel."""
    m, n, k = kernel.tile
    one_tile = kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED
    if one_tile or kernel.scheduler is TileScheduler.GRID:  # one block per tile, or per slice
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
    """Clocks of one SM from an element's sum to its store.

    In a gated kernel, two elements of the tile make one element of D.
    """
    moved = operation.d.bytes * (1 + operation.epilogue.matrices + operation.symmetric)
    epilogue = operation.epilogue
    activation = epilogue.backward.activation if epilogue.backward else epilogue.activation
    clocks = moved / STORE_BYTES_PER_CLOCK
    if activation is not None:
        clocks += max(activation.approximations * APPROXIMATION_CLOCKS, SIMPLE_CLOCKS)
    return clocks / 2 if epilogue.is_gated else clocks


def _k_tile(kernel: CutlassKernel) -> tuple[float, float]:
    """Tensor-core clocks of one SM for one K tile of an output tile, and the bytes to copy."""
    m, n, k = kernel.tile
    bits = kernel.operation.a.bits
    arch = architecture(kernel.arch)
    if arch is SM90:
        instructions = ceil(m / 64) * k * bits / 256
        # `wgmma` of 64×N×(256 bits) takes N/2 clocks of the tensor core, unless reading A and B
        # from shared memory at 128 bytes a clock takes longer (N < 64).
        compute = instructions * max(n / 2, 16 + n / 4)
    else:
        compute = 2 * m * n * k / arch.peak_flops_per_clock(bits)
    if kernel.operation.is_narrow_float and not kernel.fast_accumulation:
        compute *= PRECISE_FP8
    ingest = float(footprint.stage_bytes(kernel))
    # An operand that is contiguous along M or N has 128-byte rows there only for some extents.
    types = operands(kernel.operation, swapped=kernel.swapped)
    along_m = 0 if types.a_row_major else m
    along_n = n if types.b_row_major else 0
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
    # Reads from L2 with multicast: the cluster shares A along N, and B along M.
    read = (m / cluster_n + n / cluster_m) / (m * n)
    compute *= 1 + MULTICAST_GAIN * read * 128
    return compute, ingest
