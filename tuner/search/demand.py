"""What tuning a problem is expected to save: the time that the queue and suites are ordered by.

Tuning goes first where most time is at stake: calls × time of a call × share of it saved. Time and
share are guesses from winners of near problems, else from a roofline and the mean over the shipped
winners: enough to order problems, too little to promise anything. A guess reads the sizes of one
kind's problems and a few winners, in some milliseconds; nothing is enumerated.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from gemmsmith.core.config import MAX_DISTANCE
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tuner.arch import ARCHITECTURES, SM90
from tuner.backends.cutlass.features import EPILOGUE_US, LAUNCH_US, PROLOGUE_US
from tuner.search.cost_model import CLOCK_SUSTAINED, MEMORY_BANDWIDTH, MEMORY_EFFICIENCY
from tuner.store import Store
from tuner.trial import Winner
from tuner.workloads.footprint import footprint

NEIGHBOURS = 8
"""Nearest winners asked: the gain is a mean, and those farther off have little to say about it."""

TYPICAL_GAINS = {
    "bf16": 0.0426,
    "fp16": 0.0474,
    "fp8_e4m3": 0.0824,
    "tf32": 0.0371,
    "int8": 0.3004,
    "out_f32": 0.0543,
    "group_depth": 0.0982,
    "group_rows": 0.1551,
    "epilogue": 0.1979,
    "out_e4m3": 0.5801,
}
"""Share of the default's time that tuning saves where no neighbour tells, by kind: the mean of
1 - 1/speed-up over the 1691 winners in configs/winners (H200 and H100, 2026-11-25), 0 where the
default stays. `out_f32` are weight gradients added to FP32 sums."""

OTHER_GAIN = 0.1457
"""The same over all of them, for kinds of which none is shipped."""


def estimate(store: Store, problem: Problem, device: DeviceModel | None) -> float:
    """`saving_us` with the winners that the store knows now.

    Raises:
        StoreError: the database cannot be read.
    """
    near = store.near_winners(problem, device.slug, NEIGHBOURS) if device is not None else []
    return saving_us(problem, device, near)


def saving_us(problem: Problem, device: DeviceModel | None, near: Sequence[Winner]) -> float:
    """Microseconds that one call of `problem` is expected to get faster by tuning it.

    `device` is what it is to be tuned on; None where not known, then taken for an H200. `near` are
    current winners of the same types, layout, batch and device, nearest first. Where one is of
    the problem itself, that was tuned: nothing more is expected, and the answer is 0.
    """
    near = [winner for winner in near if problem.distance(winner.problem) <= MAX_DISTANCE]
    if near and near[0].problem == problem:
        return 0.0
    gain = fmean(map(_gain, near)) if near else typical_gain(problem.operation)
    return default_us(problem, device, near) * gain


def typical_gain(operation: Operation) -> float:
    """The gain of products of this kind, by what sets it apart most."""
    kinds = (
        "out_e4m3" if operation.stores_fp8 else "",
        "epilogue" if operation.epilogue is not Epilogue.NONE else "",
        f"group_{operation.grouping.value}",
        "out_f32" if operation.accumulate else "",
        operation.types.value,
    )
    return next((TYPICAL_GAINS[one] for one in kinds if one in TYPICAL_GAINS), OTHER_GAIN)


def _gain(winner: Winner) -> float:
    """Share of cuBLAS's time that callers of the winner's problem are spared."""
    if winner.use.is_default or winner.speedup is None:
        return 0.0
    return 1 - 1 / winner.speedup.median


def default_us(problem: Problem, device: DeviceModel | None, near: Sequence[Winner]) -> float:
    """Microseconds that the default takes: the nearest measured one, scaled as the roofline does.

    `device` and `near` are as for `saving_us`.
    """
    for winner in near:
        if winner.baseline is not None:
            scale = roofline_us(problem, device) / roofline_us(winner.problem, device)
            return winner.baseline.median_us * scale
    return roofline_us(problem, device)


def roofline_us(problem: Problem, device: DeviceModel | None) -> float:
    """Microseconds that a good default takes: tensor cores or memory at their sustained rates, and
    a launch; then, of a fused product, what torch keeps between its steps. The default's time is
    within a factor of 2 of it for 1,574 of the 1,691 shipped winners, 1.09 times it at the median;
    where it is not, rows are unaligned or types are INT8, for which libraries are slow.
    """
    # A device not known yet is taken for the one that the cost model's constants are fitted on.
    arch, sm_count, bandwidth = SM90, SM90.typical_sm_count, MEMORY_BANDWIDTH
    if device is not None:
        arch, sm_count = ARCHITECTURES.get(device.arch, SM90), device.sm_count
        bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY or MEMORY_BANDWIDTH
    flops_per_clock = sm_count * arch.peak_flops_per_clock(problem.operation.a.bits)
    compute = problem.flops / (flops_per_clock * CLOCK_SUSTAINED)
    memory = problem.operand_bytes / bandwidth
    between = footprint(problem).default / bandwidth if problem.operation.is_fused else 0.0
    return LAUNCH_US + PROLOGUE_US + EPILOGUE_US + (max(compute, memory) + between) * 1e6
