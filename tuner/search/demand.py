"""The time that tuning a problem is expected to save, by which the queue and suites are ordered.

Problems with most time at stake come first: calls × time of a call × share of it saved. Time and
share are estimates from winners of near problems, else from a roofline and the mean over the
shipped winners: good enough to order problems, not to promise anything. An estimate reads the sizes
of one kind's problems and a few winners, in some milliseconds; nothing is enumerated.
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
"""Nearest winners whose mean gain is taken: farther ones say little about this problem."""

TYPICAL_GAINS = {
    "order": 0.0756,
    "bf16": 0.0395,
    "fp16": 0.0474,
    "fp8_e4m3": 0.078,
    "tf32": 0.0371,
    "int8": 0.3004,
    "out_f32": 0.0543,
    "group_depth": 0.1319,
    "group_rows": 0.1553,
    "epilogue": 0.2387,
    "symmetric": 0.2364,
    "out_e4m3": 0.5904,
}
"""Share of the default's time that tuning saves, by kind, for problems without neighbours: the mean
of 1 - 1/speed-up over the 2724 winners in configs/winners (H200 and H100, 2026-11-27), 0 if the
default stays. `out_f32` are weight gradients added to FP32 sums, `order` products that demand an
order of sums, whose default keeps none."""

OTHER_GAIN = 0.1601
"""The mean over all of them, for kinds without a shipped winner."""


def estimate(store: Store, problem: Problem, device: DeviceModel | None) -> float:
    """`saving_us` with the winners that the store knows now.

    Raises:
        StoreError: the database cannot be read.
    """
    near = store.near_winners(problem, device.slug, NEIGHBOURS) if device is not None else []
    return saving_us(problem, device, near)


def saving_us(problem: Problem, device: DeviceModel | None, near: Sequence[Winner]) -> float:
    """Microseconds that one call of `problem` is expected to get faster by tuning it.

    `device` is the device model it is tuned on; None if unknown, which counts as an H200. `near`
    are current winners of the same types, layout, batch and device, nearest first. If the problem
    itself has one, it was tuned already: the answer is 0.
    """
    near = [winner for winner in near if problem.distance(winner.problem) <= MAX_DISTANCE]
    if near and near[0].problem == problem:
        return 0.0
    gain = fmean(map(_gain, near)) if near else typical_gain(problem.operation)
    return default_us(problem, device, near) * gain


def typical_gain(operation: Operation) -> float:
    """The gain of products of this kind: that of its first property with a known gain."""
    kinds = (
        "order" if operation.summation is not None else "",
        "out_e4m3" if operation.stores_fp8 else "",
        "epilogue" if operation.epilogue is not Epilogue.NONE else "",
        f"group_{operation.grouping.value}",
        "out_f32" if operation.accumulate else "",
        "symmetric" if operation.symmetric else operation.types.value,
    )
    return next((TYPICAL_GAINS[kind] for kind in kinds if kind in TYPICAL_GAINS), OTHER_GAIN)


def _gain(winner: Winner) -> float:
    if winner.use.is_default or winner.speedup is None:
        return 0.0
    return 1 - 1 / winner.speedup.median


def default_us(problem: Problem, device: DeviceModel | None, near: Sequence[Winner]) -> float:
    """Microseconds that the default takes: the nearest measured time, scaled as the roofline is.

    `device` and `near` are as for `saving_us`.
    """
    for winner in near:
        if winner.baseline is not None:
            # What the roofline leaves out is about the same for both, so it cancels out.
            scale = roofline_us(problem, device) / roofline_us(winner.problem, device)
            return winner.baseline.median_us * scale
    return roofline_us(problem, device)


def roofline_us(problem: Problem, device: DeviceModel | None) -> float:
    """Microseconds that a good default takes: tensor cores or memory at their sustained rates, and
    a launch; for a fused product also writing and reading the tensors between torch's steps. Of a
    symmetric product a default computes all elements.

    The default's time is within a factor of 2 of it for 1,574 of the 1,691 shipped winners, 1.09
    times it at the median; the others have unaligned rows or INT8, for which libraries are slow.
    """
    # An unknown device counts as the one that the cost model's constants are fitted on.
    arch, sm_count, bandwidth = SM90, SM90.typical_sm_count, MEMORY_BANDWIDTH
    if device is not None:
        arch, sm_count = ARCHITECTURES.get(device.arch, SM90), device.sm_count
        bandwidth = device.memory_bandwidth * MEMORY_EFFICIENCY or MEMORY_BANDWIDTH
    flops_per_clock = sm_count * arch.peak_flops_per_clock(problem.operation.a.bits)
    flops = problem.flops * (2 if problem.operation.symmetric else 1)
    compute = flops / (flops_per_clock * CLOCK_SUSTAINED)
    memory = problem.operand_bytes / bandwidth
    between = footprint(problem).default / bandwidth if problem.operation.is_fused else 0.0
    return LAUNCH_US + PROLOGUE_US + EPILOGUE_US + (max(compute, memory) + between) * 1e6
