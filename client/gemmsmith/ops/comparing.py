"""`gemmsmith.compare`: whether a step of a program is faster with winners, told by the step itself.

A winner beat cuBLAS by itself, many launches on end. In a program other kernels come between: they
leave other things in L2, other clocks, and nothing to overlap with. Mostly the gain is what was
measured, and now and then it is lost (docs/training.md has both). What a whole step gains, no
tuner can tell beforehand; a minute of steps can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from gemmsmith.answer import Ratio
from gemmsmith.ops.patching import opened

LEAST_BLOCKS = 6
"""Fewer paired blocks give no 95% interval of a median."""

WARM_STEPS = 3


def compare(
    step: Callable[[], object],
    model: torch.nn.Module | None = None,
    *,
    tuned: Callable[[], object] | None = None,
    blocks: int = 16,
    steps: int = 5,
) -> Ratio:
    """How many times faster `step` is under `patch(model)` than without: stock ÷ tuned seconds.

    Call it outside of patch blocks, which would hold for both sides.

    Some steps without winners alternate with as many with them, so that clocks and temperature are
    the same for both; three of each go first, untimed. Every call is a real step: what it trains,
    it trains. Use winners if the whole interval is above 1:

        with gemmsmith.patch(model) if gain.ci_low > 1 else contextlib.nullcontext():

    On several ranks it is a collective, and a block takes as long as on the slowest rank: all
    get the same answer. The kernels that compute a CUDA graph are those that were captured: capture
    one graph for each side, and give the one of a patch block as `tuned`.

    Args:
        step: one step, synchronous or not: the GPU is waited for after each block.
        model: as of `patch`; None: everything.
        tuned: what to run in place of `step` where winners are used.
        blocks: pairs of blocks timed.
        steps: of each block.

    Returns:
        The median of the paired ratios, with its 95% interval.

    Raises:
        ValueError: fewer than 6 blocks, or no steps.
    """
    if blocks < LEAST_BLOCKS:
        raise ValueError(f"blocks must be at least {LEAST_BLOCKS}, not {blocks}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    stock: list[float] = []
    ours: list[float] = []

    def run_stock(count: int) -> None:
        stock.append(_seconds(step, count))

    def run_tuned(count: int) -> None:
        with opened(model):
            ours.append(_seconds(tuned or step, count))

    run_stock(WARM_STEPS)
    run_tuned(WARM_STEPS)
    for block in range(blocks):
        sides = (run_stock, run_tuned) if block % 2 == 0 else (run_tuned, run_stock)
        for side in sides:
            side(steps)
    return paired(_slowest(stock[1:]), _slowest(ours[1:]))


def paired(stock: Sequence[float], tuned: Sequence[float]) -> Ratio:
    """The median of stock ÷ tuned, pair by pair, and its 95% interval by order statistics."""
    ratios = sorted(theirs / mine for theirs, mine in zip(stock, tuned, strict=True))
    n = len(ratios)
    # So many at either end lie beyond the median with a chance of 5%, by the normal distribution.
    skipped = max(0, int(n / 2 - 0.98 * n**0.5))
    return Ratio(median=median(ratios), ci_low=ratios[skipped], ci_high=ratios[-1 - skipped])


def _seconds(step: Callable[[], object], count: int) -> float:
    _settle()
    began = time.perf_counter()
    for _ in range(count):
        step()
    _settle()
    return time.perf_counter() - began


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _slowest(seconds: list[float]) -> list[float]:
    """Block by block on whichever rank took longest; without a process group as they are."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return seconds
    everyones: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, seconds)
    return [max(block) for block in zip(*everyones, strict=True)]
