"""What a learned cost model sees of a candidate, and the measurements that it learns from.

A candidate is one row of numbers, always the same columns: pure arithmetic on the problem, the
candidate and the device model. Extents, tiles and clusters are in the kernel's own orientation.
Whoever changes what a column means, or which there are, counts `FEATURES_VERSION` up: older models
are refused then. What the analytic model predicts is a column, and what a model corrects: a change
of its constants is such a change too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import median

from gemmsmith.candidate import Candidate
from gemmsmith.device import DeviceModel, Environment
from gemmsmith.kernel import (
    Backend,
    CutlassKernel,
    EpilogueSchedule,
    MainloopSchedule,
    TileScheduler,
    cutlass,
)
from gemmsmith.launch import Decomposition, Launch, RasterOrder
from gemmsmith.problem import Problem
from gemmsmith.tiles import TileGrid, extents, tile_grid
from tuner.arch import architecture
from tuner.backends.cutlass import footprint
from tuner.backends.cutlass.grid import heuristic_raster
from tuner.backends.cutlass.operation import is_padded
from tuner.devices.recording import Sweep
from tuner.trial import Phase, Trial

FEATURES_VERSION = 1

PROBLEM_FEATURES = (
    "log2_k",
    "batch",
    "element_bytes",
    "a_row_major",
    "b_row_major",
    "flops_per_byte",  # of the operands' and the output's fewest bytes
    "l2_share",  # those bytes, relative to the device's L2
)
KERNEL_FEATURES = (
    "log2_m",
    "log2_n",
    "tile_m",
    "tile_n",
    "tile_k",
    "cluster_m",
    "cluster_n",
    "stages",
    "cpasync",
    "warp_specialized",
    "pingpong",
    "cooperative",
    "grid",
    "stream_k_scheduler",
    "split_k_scheduler",
    "cluster_split_k",
    "cute",
    "swapped",
    "fast_accumulation",
    "stores_from_registers",
    "padded",
    "accumulator_registers",
    "k_tile_bytes",
    "shared_bytes",
    "flops_per_k_tile_byte",
    "useful_share",  # of the tiles' extents, what lies within the problem
    "tiles",
)
LAUNCH_FEATURES = (
    "stream_k",
    "splits",
    "raster_along_m",
    "swizzle",
    "resident_blocks",
    "waves",
    "last_wave_fill",
    "k_tiles_per_block",
    "log2_analytic_us",
    "analytic_over_least_us",  # the analytic model's time over that of the best candidate
)
FEATURES = PROBLEM_FEATURES + KERNEL_FEATURES + LAUNCH_FEATURES


LEAST_CANDIDATES = 16
"""Problems with fewer measured candidates say little about order, and would count like others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One candidate's time on one problem."""

    problem: Problem
    device: DeviceModel
    environment: Environment
    candidate: Candidate
    us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """All that was measured on one problem and device model; the two tuples are parallel."""

    problem: Problem
    device: DeviceModel
    environments: tuple[Environment, ...]
    candidates: tuple[Candidate, ...]
    times_us: tuple[float, ...]


def features(
    problem: Problem,
    candidates: Sequence[Candidate],
    device: DeviceModel,
    analytic_us: Sequence[float],
) -> list[list[float]]:
    """A row of `FEATURES` for each candidate, in their order.

    `analytic_us`: what the analytic model predicts for each. The least of them is taken over the
    candidates given, so give all that are to be compared.
    """
    shared = _problem(problem, device)
    least = min(analytic_us, default=1.0)
    kernels: dict[str, tuple[TileGrid, list[float]]] = {}
    rows = []
    for candidate, us in zip(candidates, analytic_us, strict=True):
        kernel = cutlass(candidate.kernel)
        known = kernels.get(kernel.name)
        if known is None:
            grid = tile_grid(kernel, problem)
            known = kernels[kernel.name] = grid, shared + _kernel(kernel, problem, grid)
        grid, row = known
        rows.append([*row, *_launch(kernel, candidate.launch, grid, device), log2(us), us / least])
    return rows


def observed_in_sweep(sweep: Sweep) -> Iterator[Observation]:
    """Every candidate's median over the rounds that all candidates of a problem shared."""
    device, environment = sweep.header.device, sweep.header.environment
    for problem, recorded in sweep.problems.items():
        for trial in recorded.trials:
            if trial.failure is None and trial.common_us:
                yield Observation(
                    problem=problem,
                    device=device,
                    environment=environment,
                    candidate=trial.candidate,
                    us=median(trial.common_us),
                )


def observed_in_trials(trials: Iterable[Trial]) -> Iterator[Observation]:
    """Measured trials, finals first, later before earlier; replayed ones are in their sweeps."""
    latest_first = [trial for trial in trials if trial.measured and not trial.replayed][::-1]
    for trial in sorted(latest_first, key=lambda each: each.phase is not Phase.FINAL):
        if trial.statistics is not None:
            yield Observation(
                problem=trial.problem,
                device=trial.device,
                environment=trial.environment,
                candidate=trial.candidate,
                us=trial.statistics.median_us,
            )


def gathered(observations: Iterable[Observation]) -> list[Measured]:
    """By device model and problem, in a fixed order; of a candidate the first observation counts.

    Problems with fewer than `LEAST_CANDIDATES` are left out.
    """
    groups: dict[tuple[str, Problem], dict[str, Observation]] = {}
    for one in observations:
        group = groups.setdefault((one.device.slug, one.problem), {})
        group.setdefault(one.candidate.key, one)
    return [
        _measured([group[key] for key in sorted(group)])
        for _, group in sorted(groups.items(), key=lambda item: item[0])
        if len(group) >= LEAST_CANDIDATES
    ]


def _problem(problem: Problem, device: DeviceModel) -> list[float]:
    return [
        log2(problem.k),
        problem.batch,
        problem.operation.a.bytes,
        problem.layout.a_row_major,
        problem.layout.b_row_major,
        problem.flops / problem.operand_bytes,
        problem.operand_bytes / max(device.l2_bytes, 1),
    ]


def _kernel(kernel: CutlassKernel, problem: Problem, grid: TileGrid) -> list[float]:
    m, n = extents(kernel, problem)
    tile_m, tile_n, tile_k = kernel.tile
    k_tile_bytes = footprint.stage_bytes(kernel)
    return [
        log2(m),
        log2(n),
        tile_m,
        tile_n,
        tile_k,
        *kernel.cluster,
        footprint.stages(kernel),
        kernel.mainloop is MainloopSchedule.CPASYNC_WARP_SPECIALIZED,
        kernel.mainloop is MainloopSchedule.WARP_SPECIALIZED,
        kernel.mainloop is MainloopSchedule.PINGPONG,
        kernel.mainloop is MainloopSchedule.COOPERATIVE,
        kernel.scheduler is TileScheduler.GRID,
        kernel.scheduler is TileScheduler.STREAM_K,
        kernel.scheduler is TileScheduler.SPLIT_K,
        kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K,
        kernel.backend is Backend.CUTE,
        kernel.swapped,
        kernel.fast_accumulation,
        kernel.epilogue is EpilogueSchedule.NO_SMEM,
        is_padded(kernel),
        footprint.accumulator_registers(kernel),
        k_tile_bytes,
        footprint.shared_bytes(kernel),
        2 * tile_m * tile_n * tile_k / k_tile_bytes,
        m * n * problem.batch / (grid.tiles * tile_m * tile_n),
        grid.tiles,
    ]


def _launch(
    kernel: CutlassKernel, launch: Launch, grid: TileGrid, device: DeviceModel
) -> list[float]:
    cluster = kernel.cluster[0] * kernel.cluster[1]
    if kernel.scheduler is TileScheduler.CLUSTER_SPLIT_K:
        cluster = launch.splits
    resident = architecture(device.arch).resident_blocks(device.sm_count, cluster)
    stream_k = launch.decomposition is Decomposition.STREAM_K
    units = resident if stream_k else grid.tiles * launch.splits
    waves = ceil(units / resident)
    if stream_k:
        k_tiles = grid.tiles * grid.k_tiles / resident
    else:
        k_tiles = waves * ceil(grid.k_tiles / launch.splits)
    raster = launch.raster
    if raster is RasterOrder.HEURISTIC:
        raster = heuristic_raster(grid)
    return [
        stream_k,
        launch.splits,
        raster is RasterOrder.ALONG_M,
        launch.swizzle,
        resident,
        waves,
        units / (waves * resident),
        k_tiles,
    ]


def _measured(group: Sequence[Observation]) -> Measured:
    return Measured(
        problem=group[0].problem,
        device=group[0].device,
        environments=tuple(dict.fromkeys(one.environment for one in group)),
        candidates=tuple(one.candidate for one in group),
        times_us=tuple(one.us for one in group),
    )
