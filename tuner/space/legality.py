"""Every rule of the space, each one a named predicate: the enumerator, the verifier and the tests
call the same one.

A kernel rule takes a kernel, a problem rule a kernel and a problem; both give None for legal, else
the reason. What a rule says in CUTLASS is named beside it: a static assertion of its headers,
`can_implement`, or a limit of the hardware. Nothing here compiles or needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from gemmsmith.errors import InvalidProblem
from gemmsmith.kernel import (
    TMA_MAINLOOPS,
    Backend,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
)
from gemmsmith.operation import Operation
from gemmsmith.problem import Problem
from tuner.space import footprint
from tuner.space.grid import needs_grid_limits, tile_grid
from tuner.space.operation import backend_of, name_of, operands, warps_2x

TMA_BYTES = 16
"""TMA wants every row to start at a multiple of this (`tma_alignment_bytes`)."""
CPASYNC_MIN_BYTES = 4
"""`cp.async` copies at least this much at a time (`cp_async_min_alignment_bytes`)."""

MAX_CLUSTER_SIDE = 4
MAX_CLUSTER_BLOCKS = 8
"""Portable cluster size: more needs an opt-in, and fewer of them fit a GPC."""

MAX_ACCUMULATORS = 192
"""Accumulator registers per thread without spills; a consumer has 232 to 240 in all. Seen on nvcc
13.0: 256×256 cooperative and 128×256 ping-pong (256 of them) spill 4.8 kB; 192 spills nothing
that matters."""
MAX_ACCUMULATORS_CPASYNC = 128
"""The cp.async kernels do not move registers between warpgroups: 384 threads get 168 each."""

MMA_PROMOTION_INTERVAL = 4
"""Default `mma_promotion_interval` of precise FP8 kernels, in wgmma instructions of K = 32."""

MAX_GRID_YZ = 65535
"""CUDA's limit for a grid's second and third dimension."""

KernelRule = Callable[[CutlassKernel], str | None]
ProblemRule = Callable[[CutlassKernel, Problem], str | None]


def architecture_is_known(kernel: CutlassKernel) -> str | None:
    """The space holds sm90 kernels."""
    return None if kernel.arch == "sm90" else f"no kernels for architecture {kernel.arch}"


def operation_exists(kernel: CutlassKernel) -> str | None:
    """8-bit operands are K-major on Hopper (`gmma_ss_tag_to_major_A`): layout tn, and so on."""
    try:
        Operation.of(kernel.dtype, kernel.layout)
    except InvalidProblem as error:
        return str(error)
    return None


def fast_accumulation_is_fp8(kernel: CutlassKernel) -> str | None:
    """Fast accumulation is a variant of the TMA mainloops for FP8."""
    if kernel.fast_accumulation and not (
        kernel.operation.is_narrow_float and kernel.mainloop in TMA_MAINLOOPS
    ):
        return "fast accumulation exists for FP8 with a TMA mainloop only"
    return None


def backend_matches_mainloop(kernel: CutlassKernel) -> str | None:
    """Multistage kernels are CUTLASS 2.x, those that add up in a cluster ours, all others 3.x."""
    if kernel.backend is not backend_of(kernel.mainloop, kernel.scheduler):
        return f"{kernel.mainloop} with {kernel.scheduler} is not a kernel of {kernel.backend}"
    return None


def scheduler_matches_mainloop(kernel: CutlassKernel) -> str | None:
    """Which tile schedulers a mainloop takes; stream-K: cooperative only (static assertions)."""
    allowed = _SCHEDULERS[kernel.mainloop]
    if kernel.scheduler not in allowed:
        return f"{kernel.mainloop} does not take the {kernel.scheduler} scheduler"
    return None


_SCHEDULERS = {
    MainloopSchedule.MULTISTAGE: (TileScheduler.GRID,),
    MainloopSchedule.CPASYNC_WARP_SPECIALIZED: (TileScheduler.GRID, TileScheduler.PERSISTENT),
    MainloopSchedule.WARP_SPECIALIZED: (
        TileScheduler.GRID,
        TileScheduler.SPLIT_K,
        TileScheduler.CLUSTER_SPLIT_K,
    ),
    MainloopSchedule.PINGPONG: (TileScheduler.PERSISTENT, TileScheduler.SPLIT_K),
    MainloopSchedule.COOPERATIVE: (
        TileScheduler.PERSISTENT,
        TileScheduler.STREAM_K,
        TileScheduler.SPLIT_K,
    ),
}


def epilogue_matches_mainloop(kernel: CutlassKernel) -> str | None:
    """TMA epilogues go with TMA mainloops; cp.async stores from registers; 2.x has its own."""
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        legal = kernel.epilogue is EpilogueSchedule.NO_SMEM
    elif kernel.scheduler is TileScheduler.SPLIT_K:
        legal = kernel.epilogue is EpilogueSchedule.TMA
    elif kernel.mainloop in TMA_MAINLOOPS:
        legal = kernel.epilogue in (EpilogueSchedule.TMA, EpilogueSchedule.NO_SMEM)
    elif kernel.mainloop is MainloopSchedule.MULTISTAGE:
        legal = kernel.epilogue is EpilogueSchedule.THREADBLOCK
    else:
        legal = kernel.epilogue is EpilogueSchedule.NO_SMEM
    return None if legal else f"{kernel.mainloop} does not take the {kernel.epilogue} epilogue"


def tile_m_is_whole_warpgroups(kernel: CutlassKernel) -> str | None:
    """`wgmma` computes 64 rows, and cooperative kernels give each warpgroup its own."""
    if kernel.backend is Backend.CUTLASS2X:
        return None
    rows = 128 if kernel.mainloop is MainloopSchedule.COOPERATIVE else 64
    if kernel.tile[0] < rows or kernel.tile[0] % rows or kernel.tile[0] > 256:
        return f"{kernel.mainloop} needs tile M a multiple of {rows} up to 256"
    return None


def tile_n_fits_instruction(kernel: CutlassKernel) -> str | None:
    """`wgmma` has N = 8, 16 … 256."""
    n = kernel.tile[1]
    if kernel.backend is not Backend.CUTLASS2X and (n % 8 or not 8 <= n <= 256):
        return f"tile N must be a multiple of 8 up to 256, not {n}"
    return None


def tile_k_fits_swizzle(kernel: CutlassKernel) -> str | None:
    """Tile K fills whole 128-byte swizzle rows (64-byte ones for FP8 at K = 64)."""
    if kernel.backend is Backend.CUTLASS2X:
        return None
    allowed = (64, 128, 256) if kernel.operation.a.bits == 8 else (64, 128)
    return None if kernel.tile[2] in allowed else f"tile K must be one of {allowed}"


def k_major_b_fills_swizzle_atoms(kernel: CutlassKernel) -> str | None:
    """16-bit K-major B: its stages must be addressable in the 128-byte swizzle.

    CuTe slices the pipeline dimension out of the swizzled layout, which it can express only if
    64-element slabs of tile N rows are whole pairs of 8-row atoms, or a single atom repeated an
    even number of times (static assertions "Stride" and "Shape Divisibility Condition").
    """
    if kernel.backend is Backend.CUTLASS2X or kernel.operation.a.bits == 8:
        return None
    if operands(kernel.operation, swapped=kernel.swapped).b_row_major:
        return None
    n, k = kernel.tile[1], kernel.tile[2]
    if n % 16 == 0 or (n == 8 and (k // 64 * footprint.stages(kernel)) % 2 == 0):
        return None
    return f"tile N = {n} leaves half a swizzle atom in K-major B"


def tile_is_built_in_2x(kernel: CutlassKernel) -> str | None:
    """CUTLASS 2.x tiles come with a warp arrangement; K is that of two instructions."""
    if kernel.backend is not Backend.CUTLASS2X:
        return None
    if warps_2x(kernel.tile) is None or kernel.tile[2] * kernel.operation.a.bits != 512:
        return f"no warp arrangement for the 2.x tile {kernel.tile}"
    return None


def promotion_interval_divides(kernel: CutlassKernel) -> str | None:
    """Precise FP8: whole mainloop iterations between promotions (`can_implement`)."""
    precise = kernel.operation.is_narrow_float and not kernel.fast_accumulation
    if precise and kernel.mainloop in TMA_MAINLOOPS and kernel.tile[2] > 128:
        return f"precise FP8 accumulates over at most {32 * MMA_PROMOTION_INTERVAL} of K at once"
    return None


def cluster_is_portable(kernel: CutlassKernel) -> str | None:
    """Up to 4 blocks along M and N, 8 in all; only TMA mainloops multicast."""
    m, n = kernel.cluster
    if kernel.mainloop not in TMA_MAINLOOPS:
        return None if (m, n) == (1, 1) else f"{kernel.mainloop} takes clusters of 1×1 only"
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K and (m, n) != (1, 1):
        return "the cluster lies along K: its size is the launch's number of splits"
    powers = m in (1, 2, 4) and n in (1, 2, 4)
    if not powers or m * n > MAX_CLUSTER_BLOCKS:
        return f"cluster {m}×{n} is not 1, 2 or {MAX_CLUSTER_SIDE} a side, 8 in all"
    return None


def registers_suffice(kernel: CutlassKernel) -> str | None:
    """The accumulators fit the register file without spilling (hardware limit)."""
    if kernel.backend is Backend.CUTLASS2X:
        return None
    cpasync = kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED
    limit = MAX_ACCUMULATORS_CPASYNC if cpasync else MAX_ACCUMULATORS
    used = footprint.accumulator_registers(kernel)
    return None if used <= limit else f"{used} accumulator registers a thread exceed {limit}"


def pipeline_is_deep_enough(kernel: CutlassKernel) -> str | None:
    """At least two stages (static assertion); exactly two for CUTLASS 2.x at alignment 1."""
    depth = footprint.stages(kernel)
    if kernel.backend is Backend.CUTLASS2X:
        return None if kernel.stages == 2 else "alignment 1 needs exactly 2 stages in CUTLASS 2.x"
    return None if depth >= 2 else f"a pipeline of {depth} stages is no pipeline"


def shared_memory_suffices(kernel: CutlassKernel) -> str | None:
    """Mainloop, epilogue and barriers fit a thread block's shared memory (launch failure)."""
    used = footprint.shared_bytes(kernel)
    if used > footprint.SHARED_MEMORY_BYTES:
        return f"{used} bytes of shared memory exceed {footprint.SHARED_MEMORY_BYTES}"
    return None


def alignment_suits_mainloop(kernel: CutlassKernel) -> str | None:
    """TMA copies rows of 16 bytes' alignment, cp.async 4 to 16, 2.x is kept for alignment 1.

    A plain TMA kernel at alignment 1 copies what TMA cannot read (`padded.hpp`).
    """
    size = kernel.alignment_a * kernel.operation.a.bytes
    if kernel.mainloop in TMA_MAINLOOPS:
        can_pad = kernel.scheduler is TileScheduler.PERSISTENT
        legal = size == TMA_BYTES or (can_pad and kernel.alignment_a == 1)
    elif kernel.mainloop is MainloopSchedule.MULTISTAGE:
        legal = kernel.alignment_a == 1
    else:
        legal = size in (CPASYNC_MIN_BYTES, 8, 16)
    return None if legal else f"{kernel.mainloop} does not take alignment {kernel.alignment_a}"


def cpasync_threads_cover_tile(kernel: CutlassKernel) -> str | None:
    """The producer's threads tile A and B evenly (`make_simt_gmem_tiled_copy`)."""
    if kernel.mainloop is not MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        return None
    seen = operands(kernel.operation, swapped=kernel.swapped)
    warpgroups = 2 if kernel.scheduler is TileScheduler.GRID else 1
    threads = warpgroups * footprint.WARPGROUP_THREADS
    m, n, k = kernel.tile
    for name, extent, k_major in (("A", m, seen.a_row_major), ("B", n, not seen.b_row_major)):
        major, minor = (k, extent) if k_major else (extent, k)
        along = min(threads, major // kernel.alignment_a)
        if major % kernel.alignment_a or threads % along or minor % (threads // along):
            return f"{threads} producer threads do not tile operand {name} evenly"
    return None


def fields_follow_name(kernel: CutlassKernel) -> str | None:
    """The name tells every field: see the conventions in `tuner.space.operation`."""
    expected_d = 128 // kernel.operation.d.bits if kernel.epilogue is EpilogueSchedule.TMA else 1
    if kernel.alignment_a != kernel.alignment_b or kernel.alignment_d != expected_d:
        return "A and B share one alignment, and D's follows from the epilogue"
    if kernel.swapped and kernel.backend is Backend.CUTLASS2X:
        return "CUTLASS 2.x kernels are not swapped"
    if kernel.name != name_of(kernel):
        return "the name is not CUTLASS's procedural name"
    return None


def serves_types_and_layout(kernel: CutlassKernel, problem: Problem) -> str | None:
    """The kernel was built for the problem's element types and layout."""
    if (kernel.dtype, kernel.layout) != (problem.dtype, problem.layout):
        return f"built for {kernel.dtype} {kernel.layout}"
    return None


def rows_are_aligned(kernel: CutlassKernel, problem: Problem) -> str | None:
    """Every row of A, B and D starts at the kernel's alignment (`can_implement`).

    Rows lie as densely as their contiguous extent says: K for K-major operands, M for A in nt and
    nn, N for B in tt and nt, N for D. Batches are whole matrices apart, so they align with them.
    """
    for name, extent, alignment in (
        ("A", problem.contiguous_a, kernel.alignment_a),
        ("B", problem.contiguous_b, kernel.alignment_b),
        ("D", problem.n, kernel.alignment_d),
    ):
        if extent % alignment:
            return f"rows of {name} are {extent} elements apart, not a multiple of {alignment}"
    return None


def grid_is_launchable(kernel: CutlassKernel, problem: Problem) -> str | None:
    """Kernels with a block per tile: tiles along N and batches are grid dimensions y and z."""
    grid = tile_grid(kernel, problem)
    if grid.tiles >= 2**31:
        return f"{grid.tiles} tiles do not fit a 32-bit count"
    if not needs_grid_limits(kernel):
        return None
    # Identity8 folds up to 8 tiles along N into the grid's x (CUTLASS 2.x).
    folded = 8 if kernel.backend is Backend.CUTLASS2X and grid.tiles_n >= 6 else 1
    if -(-grid.tiles_n // folded) > MAX_GRID_YZ or problem.batch > MAX_GRID_YZ:
        return f"{grid.tiles_n} tiles along N or {problem.batch} batches exceed the grid"
    return None


def cluster_sums_accumulate_fast(kernel: CutlassKernel) -> str | None:
    """`ClusterSplitKKernel` leaves FP8 sums in the tensor core: K is short in each slice."""
    precise = kernel.operation.is_narrow_float and not kernel.fast_accumulation
    if precise and kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        return "splitting K within a cluster accumulates FP8 in the tensor core only"
    return None


def splitting_takes_one_matrix(kernel: CutlassKernel, problem: Problem) -> str | None:
    """Slices of K take the place of batches; FP32 partials leave in quads (`SplitKGemm`)."""
    if kernel.scheduler not in (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K):
        return None
    return "K is split for single matrices only" if problem.batch > 1 else None


RULES: MappingProxyType[str, KernelRule] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            architecture_is_known,
            operation_exists,
            fast_accumulation_is_fp8,
            cluster_sums_accumulate_fast,
            backend_matches_mainloop,
            scheduler_matches_mainloop,
            epilogue_matches_mainloop,
            tile_m_is_whole_warpgroups,
            tile_n_fits_instruction,
            tile_k_fits_swizzle,
            tile_is_built_in_2x,
            promotion_interval_divides,
            cluster_is_portable,
            registers_suffice,
            pipeline_is_deep_enough,
            shared_memory_suffices,
            k_major_b_fills_swizzle_atoms,
            alignment_suits_mainloop,
            cpasync_threads_cover_tile,
            fields_follow_name,
        )
    }
)
"""What every kernel must satisfy, cheapest and most telling first."""

PROBLEM_RULES: MappingProxyType[str, ProblemRule] = MappingProxyType(
    {
        rule.__name__: rule
        for rule in (
            serves_types_and_layout,
            rows_are_aligned,
            grid_is_launchable,
            splitting_takes_one_matrix,
        )
    }
)
"""What a kernel must satisfy for a problem."""


def choice_refusal(kernel: CutlassKernel) -> str | None:
    """Why a kernel's choices are not legal, whatever it is called."""
    for rule in RULES.values():
        if rule is not fields_follow_name and (reason := rule(kernel)):
            return reason
    return None


def refusal(kernel: CutlassKernel, problem: Problem | None = None) -> str | None:
    """Why a kernel is not legal (for the problem, if one is given); None when it is."""
    if reason := choice_refusal(kernel) or fields_follow_name(kernel):
        return reason
    if problem is not None:
        for problem_rule in PROBLEM_RULES.values():
            if reason := problem_rule(kernel, problem):
                return reason
    return None
