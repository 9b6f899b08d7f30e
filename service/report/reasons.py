"""Says in one line why a problem stays with cuBLAS, and notes what a report lacks.

Only recorded facts are used: the interval, a share of a measured ceiling, how the winner's tiles
fill waves, the traffic that a split adds, rows that TMA cannot load, a throttle reason. Without any
of them, the line only says by how much ours is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Backend, CutlassKernel, MainloopSchedule, TileScheduler, cutlass
from gemmsmith.core.launch import Decomposition
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.core.tiles import tile_grid
from service.report.problem_rows import DeviceReport, ReportRow, unaligned_operands
from service.report.verdict import why_cublas_stays
from tuner.arch import architecture
from tuner.explain.competitors import Bound
from tuner.search.hints import choice_of

FULL = 0.95
"""Shares of filled waves and of the clock above this are not mentioned."""

PADDED = 1.15
"""Tiles that cover at least this many times the output are mentioned: they cost that much work."""

FP8_MULTIPLE = 16
"""cuBLAS takes multiples of this for K and N in FP8.

`tuner.workloads.scaled` has the same constant, but importing it needs torch.
"""

_NAME_LENGTH = 60
"""Longer kernel names of cuBLAS are cut."""
_SPLIT_SCHEDULERS = (TileScheduler.SPLIT_K, TileScheduler.CLUSTER_SPLIT_K)


def why(row: ReportRow) -> str:
    """Say why cuBLAS stays if the ratio is below 1, or costs more than it gains; else empty."""
    speedup, candidate = row.winner.speedup, row.winner.candidate
    if candidate is None:
        return "no CUTLASS candidate survived verification"
    if speedup is None:
        return ""
    if stays := why_cublas_stays(row.winner.use, speedup, row.winner.power_penalty):
        return stays
    if speedup.median >= 1.0:
        return ""
    facts = []
    if speedup.ci_high >= 1.0:
        facts.append(f"a tie: {speedup.ci_low:.3f}–{speedup.ci_high:.3f}")
    facts += [fact for fact in _facts(row, candidate) if fact]
    if not facts:
        facts.append("no cause on record")
    behind = row.cutlass.time.median_us * (1 - speedup.median) if row.cutlass else 0.0
    return "; ".join((*facts, f"{behind:.2g} µs behind"))


def _facts(row: ReportRow, candidate: Candidate) -> Iterator[str]:
    yield roof(row)
    kernel = candidate.kernel
    if not isinstance(kernel, CutlassKernel):
        yield cublas_ran(row.winner.baseline_kernels)
        return
    yield alignment(row.problem, kernel)
    yield waves(row.problem, candidate, row.winner.device.sm_count)
    yield single_tiles(row.problem, candidate, row.winner.device.sm_count)
    yield partials(row.problem, candidate)
    if row.bound is not Bound.MEMORY:
        yield padding(row.problem, kernel)
        yield throttling(row)
    yield cublas_ran(row.winner.baseline_kernels)


def roof(row: ReportRow) -> str:
    """Say how near both libraries come to the limit of the problem; empty if not measured."""
    ours, theirs = row.cutlass, row.cublas
    if ours is None or theirs is None or row.bound is None:
        return ""
    if row.bound is Bound.COMPUTE:
        return _both(ours.peak_share, theirs.peak_share, "the measured peak", "compute-bound")
    if ours.copy_share is not None:
        limit = "the bandwidth of a copy of as many bytes"
        return _both(ours.copy_share, theirs.copy_share, limit, "memory-bound")
    return _both(ours.bandwidth_share, theirs.bandwidth_share, "copy bandwidth", "memory-bound")


def _both(ours: float | None, theirs: float | None, limit: str, bound: str) -> str:
    if ours is None or theirs is None:
        return ""
    our_share, their_share = f"{ours:.0%}", f"{theirs:.0%}"
    if our_share == their_share:
        return f"{bound}: both at {our_share} of {limit}"
    return f"{bound}: at {our_share} of {limit}, cuBLAS at {their_share}"


def alignment(problem: Problem, kernel: CutlassKernel) -> str:
    """Say which rows TMA cannot load or store, and what the winner does instead."""
    operands = unaligned_operands(problem)
    if not operands:
        return ""
    rows = f"rows of {', '.join(operands)} are not 16-byte aligned"
    if kernel.backend is Backend.CUTLASS2X:
        return f"{rows}: a CUTLASS 2.x kernel without TMA and wgmma"
    if kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED:
        return f"{rows}: loads by cp.async instead of TMA"
    return rows


def waves(problem: Problem, candidate: Candidate, sm_count: int) -> str:
    """Say how many SMs the winner's tiles keep busy; empty if nearly all, or if not known."""
    # The last wave is known if an SM runs one thread block: a kernel of CUTLASS 3.x whose pipeline
    # fills shared memory. Other kernels may run several at once, so only too few blocks for all SMs
    # is a fact for them. Stream-K spreads its last wave evenly.
    kernel, launch = cutlass(candidate.kernel), candidate.launch
    blocks = tile_grid(kernel, problem).tiles
    if kernel.scheduler in _SPLIT_SCHEDULERS:
        blocks *= launch.splits
    elif kernel.scheduler is TileScheduler.STREAM_K:
        if launch.decomposition in (Decomposition.STREAM_K, Decomposition.HEURISTIC):
            return ""
        if launch.decomposition is Decomposition.SPLIT_K:
            blocks *= launch.splits
    allowed = min(sm_count, launch.sm_budget) if launch.sm_budget else sm_count
    cluster = kernel.cluster[0] * kernel.cluster[1]
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        cluster = launch.splits
    resident = architecture(kernel.arch).resident_blocks(allowed, cluster)
    if blocks <= resident:
        if blocks >= FULL * sm_count:
            return ""
        return f"{blocks} of {sm_count} SMs busy in the only wave"
    fills_shared_memory = kernel.backend is Backend.CUTLASS3X and kernel.stages == 0
    if not fills_shared_memory:
        return ""
    full, last = divmod(blocks, resident)
    count = full + bool(last)
    if blocks >= FULL * count * sm_count:
        return ""
    reason = f"{last or resident} of {sm_count} SMs busy in the last of {count} waves"
    if resident < FULL * sm_count:
        reason += f", clusters of {cluster} fit on {resident}"
    return reason


def single_tiles(problem: Problem, candidate: Candidate, sm_count: int) -> str:
    """Say if ping-pong's second consumer warpgroup is idle because each SM gets a single tile."""
    kernel = cutlass(candidate.kernel)
    persistent = kernel.scheduler is TileScheduler.PERSISTENT
    if kernel.mainloop is not MainloopSchedule.PINGPONG or not persistent:
        return ""
    cluster = kernel.cluster[0] * kernel.cluster[1]
    resident = architecture(kernel.arch).resident_blocks(sm_count, cluster)
    if tile_grid(kernel, problem).tiles > resident:
        return ""
    return "ping-pong with one tile an SM: one of two consumer warpgroups idle"


def partials(problem: Problem, candidate: Candidate) -> str:
    """Say how many bytes of FP32 sums a split along K writes to memory and reads again.

    Empty without a split, and for a split within a cluster, which adds them in shared memory.
    """
    kernel, launch = cutlass(candidate.kernel), candidate.launch
    stream_k = kernel.scheduler is TileScheduler.STREAM_K
    by_stream_k = stream_k and launch.decomposition is Decomposition.SPLIT_K
    if launch.splits <= 1 or not (by_stream_k or kernel.scheduler is TileScheduler.SPLIT_K):
        return ""
    size = launch.splits * problem.m * problem.n * problem.batch * 4
    return (
        f"split {launch.splits} times along K, {size / 1e6:.1f} MB of FP32 partials beside "
        f"{problem.operand_bytes / 1e6:.1f} MB of operands"
    )


def padding(problem: Problem, kernel: CutlassKernel) -> str:
    """Say if tiles cover much more than the output."""
    grid = tile_grid(kernel, problem)
    covered = grid.tiles * kernel.tile[0] * kernel.tile[1]
    share = covered / (problem.m * problem.n * problem.batch)
    return f"tiles cover {share:.2f} × the output" if share >= PADDED else ""


def throttling(row: ReportRow) -> str:
    """Say at which clock the GPU ran if the power cap was active while measuring."""
    conditions, most = row.winner.conditions, row.winner.device.max_clock_mhz
    if conditions is None or "sw_power_cap" not in conditions.throttle:
        return ""
    if not 0 < conditions.sm_clock_mhz < FULL * most:
        return ""
    return f"power-capped at {conditions.sm_clock_mhz:.0f} of {most} MHz"


def cublas_ran(names: Sequence[str]) -> str:
    """Say which tile and cluster cuBLAS ran, along the problem's M and N, or its kernels' names."""
    if not names:
        return ""
    choice = choice_of(names)
    if choice is None:
        return f"cuBLAS ran {' + '.join(name[:_NAME_LENGTH] for name in names)}"
    (tile_n, tile_m), (cluster_n, cluster_m) = choice.tile, choice.cluster  # its M is our N
    text = f"cuBLAS ran tiles of {tile_m}×{tile_n}"
    if cluster_m * cluster_n > 1:
        text += f" in clusters of {cluster_m}×{cluster_n}"
    return text + (", split along K" if choice.split_k else "")


def default_note(problem: Problem) -> str:
    """Say what was timed as the default if it was not one cuBLAS call of this product."""
    if not problem.operation.is_narrow_float:
        return ""
    if problem.k % FP8_MULTIPLE or problem.n % FP8_MULTIPLE:
        return "cuBLAS refuses these extents in FP8; timed: a bf16 product of operands cast before"
    return f"timed: {problem.batch} calls, torch has no batched FP8" if problem.batch > 1 else ""


def notes(report: DeviceReport) -> list[str]:
    """Say what a device's report lacks, and what in it does not match."""
    winners = [row.winner for row in report.rows]
    sentences = []
    unpaired = sum(winner.speedup is None for winner in winners)
    if unpaired:
        sentences.append(f"{unpaired} of {len(winners)} problems have no paired ratio.")
    replayed = sum(winner.replayed for winner in winners)
    if replayed:
        sentences.append(f"{replayed} of {len(winners)} winners were found on a recorded GPU.")
    ceilings, limits = report.ceilings, report.limits
    if ceilings is None or limits is None:
        return [
            f"No ceilings were measured for {report.device.slug}: shares of peak and of bandwidth "
            "and the roofline's ridge are left out. Measure them on such a GPU: `gemmsmith "
            "ceilings --device cuda:0`.",
            *sentences,
        ]
    missing = {of_dtype(dtype).types for dtype in report.dtypes if limits.peak(dtype) is None}
    if missing:
        names = ", ".join(sorted(missing))
        sentences.append(f"No peak was measured for {names}: shares of it are left out.")
    theirs = ceilings.environment
    differing = sum(not winner.environment.same_software(theirs) for winner in winners)
    if differing:
        sentences.append(
            f"{differing} of {len(winners)} winners were measured with other software than the "
            f"ceilings (driver {theirs.driver}, torch {theirs.torch}, cuBLAS {theirs.cublas})."
        )
    return sentences
