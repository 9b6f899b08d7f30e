"""An estimate of where a launch's time goes, from the grid and from the cost model's constants.

The parts of a time: the roofline's floor, then what is lost to padding, waves, L2, the epilogue,
sums of split tiles, other kernels and a lower clock; the rest is what these do not explain. It may
be negative. Both sides of a comparison are estimated in the same way, so that their difference says
more than each of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import TileScheduler, cutlass
from gemmsmith.core.problem import Problem
from tuner.backends import features
from tuner.backends.cutlass.features import (
    CLUSTER_SYNC_US,
    EPILOGUE_US,
    LAUNCH_US,
    PROLOGUE_US,
    STORE_BYTES_PER_CLOCK,
)
from tuner.explain.grid import Grid
from tuner.explain.roofline import Roofline
from tuner.search.cost_model import (
    BLOCK_MEMORY_BANDWIDTH,
    CLOCK_BURST,
    CLUSTER_REDUCE_US,
    L2_BANDWIDTH,
    L2_BYTES_PER_CLOCK,
    MEMSET_US,
    REDUCE_LAUNCH_US,
    TILE_SWITCH_US,
)
from tuner.workloads.footprint import least_bytes

_US = 1e6
_AROUND = re.compile(r"Memset|splitKreduce", re.IGNORECASE)
"""Kernels that belong to the product: zeroing, and the sum of a split's parts."""
_PREPARING = re.compile(r"prepare_grouped")
_THREE_PASSES = re.compile(r"BinaryFunctor|Functor_add|[bB]ackward")
"""Kernels that read two matrices and write one; others read one and write one."""
_ONE_PASS = re.compile(r"reduce_kernel")
_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE)
_ELEMENTWISE = re.compile(r"at::native|triton|elementwise")


class TimePart(StrEnum):
    """A part of a launch's time."""

    FLOOR = "roofline"  # least bytes, or FLOP, at the roofline's rates
    PADDING = "padding"  # tiles that reach beyond M, N or K
    WAVES = "waves"  # SMs without a tile, or too few blocks to load at full bandwidth
    L2 = "L2"  # tiles that are read again from L2
    EPILOGUE = "epilogue"  # stores that no other tile's products hide
    SPLIT = "split"  # adding up the parts of tiles that are split along K
    LAUNCH = "launch"  # start of the kernel, and loads into an empty pipeline
    KERNELS = "other kernels"  # what runs before and after the product
    POWER = "power"  # the clock is too low for the highest rate on record; sustained regime only
    REST = "rest"  # what the estimate does not explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The kernels of one launch.

    Attributes:
        others: kernels beside the product.
        passes: matrices of D's size that these read or write, at least.
    """

    others: int = 0
    passes: int = 0


def kernels_of(names: Sequence[str]) -> Kernels:
    """What the default runs beside the product, by the names of its kernels."""
    others = [name for name in names if not _AROUND.search(name) and not _is_product(name)]
    return Kernels(others=len(others), passes=sum(map(_passes, others)))


def _is_product(name: str) -> bool:
    is_elementwise = _ELEMENTWISE.search(name) or _PREPARING.search(name)
    return not is_elementwise and _PRODUCT.search(name) is not None


def _passes(name: str) -> int:
    if _PREPARING.search(name):
        return 0
    if _ONE_PASS.search(name):
        return 1
    return 3 if _THREE_PASSES.search(name) else 2


def breakdown(
    problem: Problem,
    roofline: Roofline,
    time_us: float,
    grid: Grid | None,
    *,
    candidate: Candidate | None = None,
    kernels: Kernels,
    clock_mhz: float = 0.0,
) -> dict[TimePart, float]:
    """Microseconds of each part.

    `candidate` is None for the default. `clock_mhz` is the SMs' clock in the sustained rounds, 0 if
    it is not on record.
    """
    moved_us, tensor_us = roofline.least_us(problem)
    parts = {TimePart.FLOOR: max(moved_us, tensor_us)}
    if grid is not None:
        padded_us = tensor_us / grid.whole
        parts[TimePart.PADDING] = max(moved_us, padded_us) - parts[TimePart.FLOOR]
        if grid.waves is not None:
            loaded_us = _loaded_us(least_bytes(problem), grid, roofline.bandwidth.rate)
            busy_us = max(loaded_us, padded_us / (1 - grid.lost_waves))
            parts[TimePart.WAVES] = max(0.0, busy_us - max(moved_us, padded_us))
        main_us = sum(parts.values())
        read_us = grid.l2_bytes / (L2_BYTES_PER_CLOCK * CLOCK_BURST) * _US
        parts[TimePart.L2] = max(0.0, read_us - main_us)
        # While memory is the limit, loads for the next tile go on beside a tile's stores.
        in_turn = grid.rounds if tensor_us > moved_us else 1
        parts[TimePart.EPILOGUE] = _epilogue_us(problem, grid, candidate, max(1, in_turn))
        parts[TimePart.SPLIT] = _split_us(problem, grid, candidate)
        parts[TimePart.LAUNCH] = LAUNCH_US + PROLOGUE_US
    if kernels.others:
        size = problem.m * problem.columns * problem.operation.d.bytes
        moving_us = kernels.passes * size / roofline.bandwidth.rate * _US
        parts[TimePart.KERNELS] = moving_us + kernels.others * REDUCE_LAUNCH_US
    if clock_mhz and roofline.flops_per_clock:
        at_clock_us = problem.flops / (roofline.flops_per_clock * clock_mhz)
        parts[TimePart.POWER] = max(0.0, at_clock_us - parts[TimePart.FLOOR])
    parts[TimePart.REST] = time_us - sum(parts.values())
    return parts


def _loaded_us(moved: int, grid: Grid, bandwidth: float) -> float:
    """The time to read and write all bytes; few blocks do not draw the full bandwidth."""
    slots = grid.resident * grid.blocks_per_sm
    blocks = grid.tiles * grid.splits
    if grid.shares_evenly:
        return moved / min(bandwidth, slots * BLOCK_MEMORY_BANDWIDTH) * _US
    rounds = [slots] * (blocks // slots) + [blocks % slots] * bool(blocks % slots)
    by_count = {count: rounds.count(count) for count in set(rounds)}
    return sum(
        number * moved * count / blocks / min(bandwidth, count * BLOCK_MEMORY_BANDWIDTH) * _US
        for count, number in by_count.items()
    )


def _epilogue_us(problem: Problem, grid: Grid, candidate: Candidate | None, in_turn: int) -> float:
    """The time of stores that nothing hides, of `in_turn` tiles one after the other."""
    described = features(candidate.kernel) if candidate else None
    if described is not None:
        clocks = described.store_clocks
    else:
        tile_m, tile_n, _ = grid.tile
        clocks = tile_m * tile_n * problem.operation.d.bytes / STORE_BYTES_PER_CLOCK
    alone_us = EPILOGUE_US + clocks / CLOCK_BURST * _US
    hidden_us = TILE_SWITCH_US if grid.overlaps or grid.blocks_per_sm > 1 else alone_us
    return alone_us + (in_turn - 1) * hidden_us


def _split_us(problem: Problem, grid: Grid, candidate: Candidate | None) -> float:
    if candidate is None:
        return 0.0 if grid.splits else REDUCE_LAUNCH_US
    if grid.splits <= 1:
        return MEMSET_US if grid.shares_evenly else 0.0
    if cutlass(candidate.kernel).scheduler is TileScheduler.CLUSTER_SPLIT_K:
        return CLUSTER_REDUCE_US + CLUSTER_SYNC_US
    sums = 2 * 4 * problem.m * problem.n * problem.batch * grid.splits
    return REDUCE_LAUNCH_US + sums / L2_BANDWIDTH * _US
