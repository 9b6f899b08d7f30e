"""The power penalty: what a kernel's power costs other kernels on a GPU at its power limit.

Rounds that shuffle short samples share one clock, so a kernel that draws more power than the
default slows all samples alike, and its ratio does not show it. In a program at the limit every
other kernel runs at the lower clock that it causes. Of a GPT's eight BF16 products that were faster
by up to 8% in such rounds, seven draw so much more that alone their clock is some 10% below
cuBLAS's, and the step as a whole became slower by 0.2 to 1% (NVIDIA H200, 2026-11-22).

Power is too noisy to be measured in short turns, and so are times while the clock oscillates. The
clock at which each kernel settles alone is not. Both kernels then draw the limit's power, and power
grows with the clock to about the power of GROWTH, g: at equal clocks the kernel whose own clock is
lower draws p = (other / own) ** g times as much.

A program that is wholly at the limit has the clock f at which the energy of its work over its time
is the limit: f ** g is proportional to T / E, with T and E at one clock, and its time, T / f, to
T ** (1 - 1 / g) * E ** (1 / g). So a product that is s times faster, and whose energy is p / s,
makes the program faster if s is above 1 + (p - 1) / g. That is the power penalty.

In the steps of a GPT it is right: four BF16 kernels were 1.1 times as fast there as cuBLAS's, all
others took 1% more time, which is p = 1.3, and the step took as long as before, 0.997 (0.994 ...
1.001) of its speed (NVIDIA H200, 2026-11-22). For times that are bound by memory, whose power the
clock does not change, it is too high, and a program that is not at the limit has no such cost: on
the safe side.

Sums into FP32 (`D += A·B`) have no penalty. Their default waits for memory, so its clock is high;
with a penalty, kernels up to 1.5 times as fast were rejected. Of 15 such kernels, none made a step
at the power limit slower, and some made it up to 1.15 times as fast (benchmarks/sums.py: NVIDIA
H200, 2026-11-25, twelve; NVIDIA H100, 2026-11-24, three).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean, mean
from typing import TYPE_CHECKING

from gemmsmith.core.operation import Operation
from tuner.measure.statistics import paired_ratio
from tuner.trial import Rounds

if TYPE_CHECKING:  # torch is not needed for the arithmetic
    from tuner.measure.graphs import Replay

GROWTH = 2.5
"""Exponent of power over clock: between 2 and 3 on GPUs whose voltage falls with the clock."""

POWER_LIMITED = 0.97
"""The GPU is at its power limit if its clock is below this share of the rested one."""

POWER_NEAR = 0.5
"""It may reach the limit if it draws this share of it in rounds of any regime.

Rounds leave the GPU idle while NVML answers, and sustained ones end before the clock has fallen as
far as it will: of 65536×64×2048 in FP16 it was at 1965 MHz after some and at 1635 after others
(NVIDIA H200, 2026-11-22)."""

UNHINDERED = 0.99
"""A clock of this share of the rested one is not lowered by power."""

PLACES = 2
"""Limit of contenders whose clocks are measured."""

DOUBT = 0.015
"""If the best gains so little more or less than its penalty, its clock and the default's are
measured again."""

MOST_READINGS = 4
"""Limit of measurements of clocks, 0.4 s each, of contenders and the default together."""

MOST = 2.0
"""A kernel that is faster than this exceeds any penalty: no clock falls that far."""


def is_counted(operation: Operation) -> bool:
    return not operation.accumulate


def is_power_limited(regimes: Sequence[Rounds], limit_w: float) -> bool:
    """Whether the clock fell under sustained work, or may have; False if NVML does not work.

    `regimes` are sustained, rested and any others; `limit_w` is the GPU's power limit in watts, 0
    if unknown.
    """
    sustained, rested, *_ = (rounds.conditions for rounds in regimes)
    drawn = max(rounds.conditions.power_w for rounds in regimes)
    return (
        0 < sustained.sm_clock_mhz < POWER_LIMITED * rested.sm_clock_mhz
        or 0 < POWER_NEAR * limit_w <= drawn
    )


def gain(regimes: Sequence[Rounds], i: int) -> float:
    ratios = _ratios(regimes, i)
    return geometric_mean(ratios) if min(ratios) > 1.0 else 0.0


def beyond_all_penalties(regimes: Sequence[Rounds]) -> list[int]:
    # So much faster that their clocks need not be measured.
    return [i for i in range(len(regimes[0].samples_us)) if min(_ratios(regimes, i)) > MOST]


def to_measure(regimes: Sequence[Rounds], tiles: Sequence[int]) -> list[int]:
    """The candidates whose clocks to measure: the one that gains most, and the best larger tiles.

    Only those that gain in all regimes. Kernels with larger tiles than the first read less from L2
    for the same product, and draw less power. `tiles[i]` is the area of candidate i's tile.
    """
    gains = {i: mean_gain for i in range(len(tiles)) if (mean_gain := gain(regimes, i))}
    if not gains:
        return []
    first = max(gains, key=gains.__getitem__)
    larger = [i for i in gains if tiles[i] > tiles[first]]
    return [first, *sorted(larger, key=gains.__getitem__, reverse=True)][:PLACES]


def penalties(
    graphs: Sequence[Replay],
    gains: Sequence[float],
    free_mhz: float,
    clock: Callable[[Replay], float],
    announce: Callable[[int], None],
) -> list[float | None]:
    """The factor on each contender's time in a program at the power limit.

    None if the contender cannot be the best, whatever its penalty. `graphs` are those of the
    contenders, which are `gains[i]` times as fast as the default, largest first, and last that of
    the default, whose factor is 1. `free_mhz` is the GPU's clock without a power limit; 0 if it is
    unknown, and so for the result of `clock`. `announce(i)` precedes each `clock` of graph i.
    """
    readings: list[list[float]] = [[] for _ in graphs]
    default = len(gains)

    def measure(i: int) -> None:
        announce(i)
        readings[i].append(clock(graphs[i]))

    def clock_of(i: int) -> float:
        known = [mhz for mhz in readings[i] if mhz]
        return mean(known) if known else 0.0

    def penalty_of(i: int) -> float:
        return penalty(clock_of(i), clock_of(default))

    measure(0)
    if readings[0][0] >= UNHINDERED * free_mhz > 0:
        return [1.0, *[None] * (default - 1)]
    measure(default)
    best, leader = gains[0] / penalty_of(0), 0
    for i in range(1, default):
        # To win, a contender that gains less would need a penalty below 1: not worth measuring.
        if gains[i] > best:
            measure(i)
            best, leader = max((best, leader), (gains[i] / penalty_of(i), i))
    for again in (leader, default):
        if abs(best - 1.0) < DOUBT and sum(map(len, readings)) < MOST_READINGS:
            measure(again)
    return [penalty_of(i) if readings[i] else None for i in range(default)]


def penalty(own_mhz: float, default_mhz: float) -> float:
    """The factor on the time of a kernel whose own clock is `own_mhz`; 1 if a clock is unknown."""
    if not own_mhz or not default_mhz:
        return 1.0
    return 1.0 + (float((default_mhz / own_mhz) ** GROWTH) - 1.0) / GROWTH


def _ratios(regimes: Sequence[Rounds], i: int) -> list[float]:
    """Candidate i's speed-up in each regime, as in `promotion`; 0 if it took no part."""
    return [
        paired_ratio(rounds.baseline_us, rounds.samples_us[i]).median
        if rounds.samples_us[i]
        else 0.0
        for rounds in regimes
    ]
