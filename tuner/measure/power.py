"""What a kernel's power costs its neighbours, where the GPU is at its power limit.

Rounds that shuffle short samples share one clock, so a kernel that draws more power than cuBLAS's
slows all alike and does not pay. In a program at the limit every other kernel runs at the lower
clock that it leaves. Of a GPT's eight BF16 products that were faster by up to 8% in such rounds,
seven draw so much more that alone their clock is some 10% below cuBLAS's, and the step as a whole
became slower by 0.2 to 1% (NVIDIA H200, 2026-11-22).

Power is too noisy to be read off short turns, and times at a clock that hunts are too; the clock at
which each comes to rest alone is not. Both then draw the limit's power, and power grows with the
clock to about the power of GROWTH, g: at one clock the kernel whose own is lower draws
p = (other / own) ** g as much.

A program that is wholly at the limit has the clock f at which the energy of its work over its time
is the limit: f ** g is in proportion to T / E, with T and E both taken at one clock, and what it
takes, T / f, to T ** (1 - 1 / g) * E ** (1 / g). So a product that is s times faster, and whose
energy is p / s, makes it faster where s is above 1 + (p - 1) / g. That is the power penalty.

In the steps of a GPT it is right: four BF16 kernels were 1.1 times as fast there as cuBLAS's, all
others took 1% more time, which is p = 1.3, and the step as long as before, 0.997 (0.994 ... 1.001)
of its speed (NVIDIA H200, 2026-11-22). Where times are bound by memory, whose power the clock does
not change, it is too high, and a program that is not at the limit pays nothing: on the safe side.

Sums into FP32 (`D += A·B`) pay nothing. Their default waits for memory, so its clock is high; by
that, kernels up to 1.5 times as fast were refused. Of 15 that were, none made a step at the power
limit slower, and some made it up to 1.15 times as fast (benchmarks/sums.py: NVIDIA H200,
2026-11-25, twelve; NVIDIA H100, 2026-11-24, three).
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
"""Power over clock: between 2 and 3 on GPUs whose voltage falls with the clock."""

POWER_LIMITED = 0.97
"""The GPU is at its power limit where its clock is below this share of the rested one."""

POWER_NEAR = 0.5
"""It may come to it where it draws this share of it in rounds of any state.

Rounds leave the GPU idle while NVML answers, and sustained ones are over before all that will lower
the clock has done so: of 65536×64×2048 in FP16 it was at 1965 MHz after some and at 1635 after
others (NVIDIA H200, 2026-11-22)."""

UNHINDERED = 0.99
"""A clock of this share of the rested one is not lowered by power."""

PLACES = 2
"""At most so many contenders' clocks are looked at."""

DOUBT = 0.015
"""Whoever gains so little more or less than its power costs is looked at again, and cuBLAS."""

MOST_LOOKS = 4
"""At most so many looks, at 0.4 s each, at contenders and cuBLAS together."""

MOST = 2.0
"""No clock falls so far that a kernel which is faster than this would not pay."""


def is_counted(operation: Operation) -> bool:
    """Whether power counts against a kernel of this operation."""
    return not operation.accumulate


def is_power_limited(states: Sequence[Rounds], limit_w: float) -> bool:
    """Whether the clock fell under sustained work, or may have; False where NVML does not say.

    `states` are sustained, rested and whichever others; `limit_w` is the GPU's power limit in
    watts; 0: unknown.
    """
    sustained, rested, *_ = (state.conditions for state in states)
    drawn = max(state.conditions.power_w for state in states)
    return (
        0 < sustained.sm_clock_mhz < POWER_LIMITED * rested.sm_clock_mhz
        or 0 < POWER_NEAR * limit_w <= drawn
    )


def gain(states: Sequence[Rounds], i: int) -> float:
    """Candidate i's speed-up over cuBLAS between the states, their geometric mean; 0 if it is not
    faster in each.
    """
    ratios = _ratios(states, i)
    return geometric_mean(ratios) if min(ratios) > 1.0 else 0.0


def beyond_all_prices(states: Sequence[Rounds]) -> list[int]:
    """Which candidates are so much faster that their clocks need not be looked at."""
    return [i for i in range(len(states[0].samples_us)) if min(_ratios(states, i)) > MOST]


def worth_a_look(states: Sequence[Rounds], tiles: Sequence[int]) -> list[int]:
    """Whose clock to look at: of the candidates that gain in all states the one that gains most.

    And the best of those with larger tiles than that one: they read less from L2 for the same
    product, and draw less power. `tiles[i]` is candidate i's tile's area.
    """
    gains = {i: found for i in range(len(tiles)) if (found := gain(states, i))}
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
    """What each contender's time counts in a program at the power limit.

    None: it cannot be the best, whatever its power costs. `graphs` are the contenders', `gains[i]`
    times as fast, the largest gain first, and last cuBLAS's, which counts 1. `free_mhz` is the
    clock of a GPU that no power limits; 0: unknown, as is one that `clock` gives. `announce(i)`
    precedes each `clock` of i.
    """
    looks: list[list[float]] = [[] for _ in graphs]
    stock = len(gains)

    def look(i: int) -> None:
        announce(i)
        looks[i].append(clock(graphs[i]))

    def clock_of(i: int) -> float:
        known = [mhz for mhz in looks[i] if mhz]
        return mean(known) if known else 0.0

    def paid(i: int) -> float:
        return penalty(clock_of(i), clock_of(stock))

    look(0)
    if looks[0][0] >= UNHINDERED * free_mhz > 0:
        return [1.0, *[None] * (stock - 1)]
    look(stock)
    best, leader = gains[0] / paid(0), 0
    for i in range(1, stock):
        if gains[i] > best:
            look(i)
            best, leader = max((best, leader), (gains[i] / paid(i), i))
    for again in (leader, stock):
        if abs(best - 1.0) < DOUBT and sum(map(len, looks)) < MOST_LOOKS:
            look(again)
    return [paid(i) if looks[i] else None for i in range(stock)]


def penalty(own_mhz: float, stock_mhz: float) -> float:
    """The factor on the time of a kernel whose clock alone is `own_mhz`; 1 if one is unknown."""
    if not own_mhz or not stock_mhz:
        return 1.0
    return 1.0 + (float((stock_mhz / own_mhz) ** GROWTH) - 1.0) / GROWTH


def _ratios(states: Sequence[Rounds], i: int) -> list[float]:
    """Candidate i's speed-up in each state, as `promotion` takes it; 0 where it took no part."""
    return [
        paired_ratio(state.baseline_us, state.samples_us[i]).median if state.samples_us[i] else 0.0
        for state in states
    ]
