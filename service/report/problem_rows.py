"""One row per problem, computed from its winner and from the GPU's ceilings.

Pure arithmetic: the same winners and ceilings always give the same rows. Without ceilings,
everything that needs them is None. Times are in microseconds, rates in FLOP and bytes per second,
shares in 0 … 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.answers.answer import Statistics
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Layout, in_order
from gemmsmith.core.problem import Problem
from service.report.headroom import HeadroomReport, headroom_report
from service.report.roofs import Reached, reached
from tuner.explain.competitors import Bound
from tuner.explain.headroom import Headroom, headroom
from tuner.measure.ceilings import Ceilings
from tuner.trial import Winner
from tuner.workloads.footprint import least_bytes

LOW = 0.97
"""Ratios below this are counted as slower; above it, noise may explain them (intervals are ±1%)."""

TMA_BYTES = 16
"""TMA loads and stores rows that begin at multiples of this."""

_WAVE_TILES = ((128, 128), (128, 256), (256, 128))
"""The usual tiles of fast kernels; with any of them a problem may be just over a wave."""
_OVER_A_WAVE = 1.1
"""Up to this many waves count as just over one."""


class ProblemClass(StrEnum):
    """A class of problems. A problem may be in several."""

    TOKENS_64 = "tokens_64"  # M ≤ 64: decoding
    TOKENS_256 = "tokens_256"  # 64 < M ≤ 512
    LARGE = "large"  # M ≥ 1024
    AWKWARD = "awkward"  # few tiles with a long K, one tile over a wave, tall and skinny
    UNALIGNED = "unaligned"  # rows of A, B or D that are not a multiple of 16 bytes
    BATCHED = "batched"  # more than one product
    LAYOUT_TT = "layout_tt"  # input gradients
    LAYOUT_NT = "layout_nt"  # weight gradients
    LAYOUT_NN = "layout_nn"  # both column-major


TITLES = {
    ProblemClass.TOKENS_64: "M ≤ 64",
    ProblemClass.TOKENS_256: "64 < M ≤ 512",
    ProblemClass.LARGE: "M ≥ 1024",
    ProblemClass.AWKWARD: "awkward: few tiles with long K, just over a wave, tall and skinny",
    ProblemClass.UNALIGNED: "rows not 16-byte aligned",
    ProblemClass.BATCHED: "batched",
    ProblemClass.LAYOUT_TT: "tt (input gradients)",
    ProblemClass.LAYOUT_NT: "nt (weight gradients)",
    ProblemClass.LAYOUT_NN: "nn",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The time of one library, and the rates that follow from it.

    Attributes:
        flops_per_second: of the problem's `flops`.
        bytes_per_second: of the problem's `least_bytes`, each operand moved once.
        peak_share, bandwidth_share: of the report's limits (`Reached`).
        copy_share: of the bandwidth of a copy that moves as many bytes, raised as the limits are.
    """

    time: Statistics
    flops_per_second: float
    bytes_per_second: float
    peak_share: float | None
    bandwidth_share: float | None
    copy_share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """A problem with its winner, the rates of both libraries, and its place below the roofline.

    Attributes:
        intensity: FLOP per byte of operands, each moved once.
        ridge: intensity at which the limits meet.
        headroom: of the candidate; None if it is not known.
    """

    winner: Winner
    classes: tuple[ProblemClass, ...]
    intensity: float
    ridge: float | None
    cutlass: Side | None
    cublas: Side | None
    headroom: Headroom | None

    @property
    def problem(self) -> Problem:
        return self.winner.problem

    @property
    def bound(self) -> Bound | None:
        if self.ridge is None:
            return None
        return Bound.MEMORY if self.intensity < self.ridge else Bound.COMPUTE

    @property
    def ratio(self) -> float | None:
        """Time of cuBLAS over ours, the median of paired rounds; None without paired rounds."""
        return self.winner.speedup.median if self.winner.speedup else None

    @property
    def served_ratio(self) -> float | None:
        """The same of what is served: 1 where the default is."""
        return 1.0 if self.winner.use.is_default and self.ratio is not None else self.ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Ratios of what is served, for a group of problems.

    Attributes:
        geometric_mean, median: both, because a few outliers move the mean only.
        below: how many best candidates have a ratio below `LOW`; the default is served instead.
        behind: how many best candidates have an interval wholly below 1.
        won: how many problems are served by CUTLASS.
    """

    dtype: str
    group: ProblemClass | None
    problems: int
    geometric_mean: float
    median: float
    minimum: float
    maximum: float
    below: int
    behind: int
    won: int

    @property
    def title(self) -> str:
        return TITLES[self.group] if self.group else "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """Everything on one device model."""

    device: DeviceModel
    ceilings: Ceilings | None
    limits: Reached | None
    rows: tuple[ReportRow, ...]
    summaries: tuple[Summary, ...]
    headroom: HeadroomReport

    @property
    def dtypes(self) -> tuple[str, ...]:
        return in_order(row.problem.dtype for row in self.rows)

    def of(self, dtype: str) -> tuple[ReportRow, ...]:
        return tuple(row for row in self.rows if row.problem.dtype == dtype)


def device_report(winners: Sequence[Winner], ceilings: Ceilings | None) -> DeviceReport:
    """Compute rows and summaries of the winners of one device model; there must be at least one."""
    rank = {dtype: i for i, dtype in enumerate(in_order(w.problem.dtype for w in winners))}
    ordered = sorted(winners, key=lambda w: (rank[w.problem.dtype], w.problem))
    limits = reached(winners, ceilings)
    rows = tuple(row_of(winner, ceilings, limits) for winner in ordered)
    return DeviceReport(
        device=winners[0].device,
        ceilings=ceilings,
        limits=limits,
        rows=rows,
        summaries=summaries(rows),
        headroom=headroom_report([row.headroom for row in rows if row.headroom]),
    )


def row_of(winner: Winner, ceilings: Ceilings | None, limits: Reached | None = None) -> ReportRow:
    """Compute the row of a winner. `limits` are those of its report, else of the winner alone."""
    problem = winner.problem
    limits = limits or reached([winner], ceilings)
    peak = limits.peak(problem.dtype) if limits else None
    moved = least_bytes(problem)
    copy = ceilings.bandwidth_at(moved) if ceilings else None

    def side(time: Statistics | None) -> Side | None:
        if time is None:
            return None
        flops, bandwidth = problem.flops / time.median_us * 1e6, moved / time.median_us * 1e6
        return Side(
            time=time,
            flops_per_second=flops,
            bytes_per_second=bandwidth,
            peak_share=flops / peak if peak else None,
            bandwidth_share=bandwidth / limits.bandwidth if limits else None,
            copy_share=bandwidth / (copy * limits.above_copy) if limits and copy else None,
        )

    return ReportRow(
        winner=winner,
        classes=classes_of(problem, winner.device.sm_count),
        intensity=problem.flops / moved,
        ridge=peak / limits.bandwidth if limits and peak else None,
        cutlass=side(winner.statistics),
        cublas=side(winner.baseline),
        headroom=headroom(winner),
    )


def classes_of(problem: Problem, sm_count: int) -> tuple[ProblemClass, ...]:
    """Return the classes of a problem, in the order of `ProblemClass`."""
    conditions = {
        ProblemClass.TOKENS_64: problem.m <= 64,
        ProblemClass.TOKENS_256: 64 < problem.m <= 512,
        ProblemClass.LARGE: problem.m >= 1024,
        ProblemClass.AWKWARD: few_tiles_long_k(problem)
        or over_a_wave(problem, sm_count)
        or tall_and_skinny(problem),
        ProblemClass.UNALIGNED: bool(unaligned_operands(problem)),
        ProblemClass.BATCHED: problem.batch > 1,
        ProblemClass.LAYOUT_TT: problem.layout is Layout.TT,
        ProblemClass.LAYOUT_NT: problem.layout is Layout.NT,
        ProblemClass.LAYOUT_NN: problem.layout is Layout.NN,
    }
    return tuple(name for name, holds in conditions.items() if holds)


def few_tiles_long_k(problem: Problem) -> bool:
    # With few output tiles and a long K, a split along K decides.
    return problem.m * problem.n <= 1024 * 1024 and problem.k >= 4096


def over_a_wave(problem: Problem, sm_count: int) -> bool:
    """Whether usual tiles make just over one wave, so that most SMs wait for a few."""
    for tile_m, tile_n in _WAVE_TILES:
        tiles = -(-problem.m // tile_m) * -(-problem.n // tile_n) * problem.batch
        if sm_count < tiles <= _OVER_A_WAVE * sm_count:
            return True
    return False


def tall_and_skinny(problem: Problem) -> bool:
    return problem.n <= 128 or problem.m >= 64 * problem.n


def unaligned_operands(problem: Problem) -> tuple[str, ...]:
    """Return those of A, B and D whose rows (or columns) are not a multiple of 16 bytes."""
    extents = {
        "A": problem.contiguous_a * problem.operation.a.bytes,
        "B": problem.contiguous_b * problem.operation.b.bytes,
        "D": problem.n * problem.operation.d.bytes,
    }
    return tuple(name for name, size in extents.items() if size % TMA_BYTES)


def summaries(rows: Iterable[ReportRow]) -> tuple[Summary, ...]:
    """Summarise each element type: all its problems, then each class that has any."""
    paired = [row for row in rows if row.winner.speedup is not None]
    result = []
    for dtype in in_order(row.problem.dtype for row in paired):
        of_dtype = [row for row in paired if row.problem.dtype == dtype]
        for group in (None, *ProblemClass):
            members = [row for row in of_dtype if group is None or group in row.classes]
            if members:
                result.append(_summary(dtype, group, members))
    return tuple(result)


def _summary(dtype: str, group: ProblemClass | None, rows: Sequence[ReportRow]) -> Summary:
    speedups = [row.winner.speedup for row in rows if row.winner.speedup]
    ratios = [row.served_ratio for row in rows if row.served_ratio is not None]
    return Summary(
        dtype=dtype,
        group=group,
        problems=len(ratios),
        geometric_mean=statistics.geometric_mean(ratios),
        median=statistics.median(ratios),
        minimum=min(ratios),
        maximum=max(ratios),
        below=sum(speedup.median < LOW for speedup in speedups),
        behind=sum(speedup.ci_high < 1 for speedup in speedups),
        won=sum(not row.winner.use.is_default for row in rows),
    )
