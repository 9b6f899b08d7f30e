"""The work of a problem, and the two sides that an explanation compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.core.problem import Problem
from tuner.explain.breakdown import Kernels, TimePart
from tuner.explain.grid import Grid
from tuner.explain.resources import Resources
from tuner.explain.roofline import Roofline
from tuner.workloads.footprint import least_bytes
from tuner.workloads.spreads import groups_read


class Bound(StrEnum):
    """Which side of the roofline's ridge a problem lies on."""

    MEMORY = "memory"  # fewer FLOP a byte than the ridge
    COMPUTE = "compute"  # as many or more


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a problem needs at least, and how long that takes by the roofline.

    Attributes:
        flops: a multiply and an add for each term.
        least_bytes: each operand moved once; of grouped products without weights of empty groups.
        groups_read: groups with tokens, on average over the spreads; None without groups.
        intensity: FLOP per byte.
        roofline: None if neither measurements nor the device model know one.
        floor_us, nominal_floor_us: the roofline's least time, at measured and at nominal rates.
    """

    flops: int
    least_bytes: int
    groups_read: float | None
    intensity: float
    roofline: Roofline | None
    bound: Bound | None
    floor_us: float | None
    nominal_floor_us: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Energy of one launch at the power drawn in the rounds, which both sides took in turns.

    Attributes:
        watts, clock_mhz: medians over the rounds, as NVML reports them.
    """

    watts: float
    clock_mhz: float
    joules: float
    flops_per_joule: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Competitor:
    """The candidate or the default.

    Attributes:
        kernels: kernels that run beside the product.
        tflops: 10¹² FLOP a second.
        gb_per_s: 10⁹ of the least bytes a second.
        share: the roofline's least time divided by this time; None without a roofline.
        parts: an estimate of where the time goes, in microseconds; empty without a roofline.
        grid, resources: None if they are not on record.
    """

    name: str
    kernels: Kernels
    time_us: float
    tflops: float
    gb_per_s: float
    share: float | None
    grid: Grid | None
    resources: Resources | None
    energy: Energy | None
    parts: Mapping[TimePart, float]


def work_of(problem: Problem, roofline: Roofline | None) -> Work:
    moved = least_bytes(problem)
    floor_us = nominal_us = bound = None
    if roofline is not None:
        memory_us, tensor_us = roofline.least_us(problem)
        floor_us = max(memory_us, tensor_us)
        bound = Bound.MEMORY if memory_us > tensor_us else Bound.COMPUTE
        if roofline.nominal_peak and roofline.nominal_bandwidth:
            nominal_us = 1e6 * max(
                moved / roofline.nominal_bandwidth, problem.flops / roofline.nominal_peak
            )
    return Work(
        flops=problem.flops,
        least_bytes=moved,
        groups_read=groups_read(problem) if problem.operation.is_grouped else None,
        intensity=problem.flops / moved,
        roofline=roofline,
        bound=bound,
        floor_us=floor_us,
        nominal_floor_us=nominal_us,
    )
