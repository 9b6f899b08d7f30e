"""`gemmsmith.compare`: measures whether a step of a program is faster with winners.

A winner beat cuBLAS alone, in many consecutive launches. In a program other kernels run between its
launches. They change the content of L2 and the clocks, and consecutive launches cannot overlap.
Usually the gain is as measured, but sometimes it is lost (docs/training.md shows both). A tuner
cannot predict the gain of a whole step; a minute of steps measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

from gemmsmith.answers.answer import Ratio
from gemmsmith.errors import GemmsmithError
from gemmsmith.ops.accounting import account
from gemmsmith.ops.capturing import capture
from gemmsmith.ops.models.patching import is_patched, open_patch

T = TypeVar("T")

LEAST_BLOCKS = 6
"""Fewest pairs of blocks that give a 95% interval of a median."""

WARM_STEPS = 3


def compare(
    step: Callable[[], object],
    model: torch.nn.Module | None = None,
    *,
    tuned: Callable[[], object] | None = None,
    blocks: int = 16,
    steps: int = 5,
) -> Ratio:
    """How many times as fast `step` is under `patch(model)`: stock seconds ÷ tuned seconds.

    Blocks of steps with and without winners alternate, so that clocks and temperature are the same
    for both. Three untimed steps of each come first. Every call is a real training step. Use the
    winners if the whole interval is above 1:

        with gemmsmith.patch(model) if gain.ci_low > 1 else contextlib.nullcontext():

    On several ranks this is a collective. A block counts with the time of the slowest rank, and all
    ranks get the same answer. A CUDA graph keeps the kernels that were captured: capture one graph
    for each side, and pass the one from a patch block as `tuned`.

    Args:
        step: runs one step; the GPU is synchronized after each block.
        model: as for `patch`; None: the whole process.
        tuned: runs instead of `step` in blocks with winners.
        blocks: number of pairs of blocks to time.
        steps: steps per block.

    Returns:
        The median of the paired ratios, with its 95% interval.

    Raises:
        GemmsmithError: both sides are the same: a patch is open already, or nothing was replaced in
            the untimed steps (`tuned` is always timed). The message says what is missing.
        ValueError: fewer than 6 blocks, or no steps.
    """
    if blocks < LEAST_BLOCKS:
        raise ValueError(f"blocks must be at least {LEAST_BLOCKS}, not {blocks}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if is_patched(model):
        raise GemmsmithError(
            "gemmsmith.compare: both sides would run the winners, because a patch is open: call it "
            "outside of `with gemmsmith.patch(...)`, after `gemmsmith.unpatch()`, and without "
            "`gemmsmith run` or GEMMSMITH"
        )
    stock_seconds: list[float] = []
    tuned_seconds: list[float] = []

    def run_stock(count: int) -> None:
        stock_seconds.append(_seconds(step, count))

    def run_tuned(count: int) -> None:
        with open_patch(model):
            tuned_seconds.append(_seconds(tuned or step, count))

    run_stock(WARM_STEPS)
    if tuned is not None:
        run_tuned(WARM_STEPS)
    else:
        why_nothing = _warmed(step, model)
        if all(_on_all_ranks(bool(why_nothing))):
            raise GemmsmithError(f"gemmsmith.compare: both sides would run torch: {why_nothing}")
    for block in range(blocks):
        sides = (run_stock, run_tuned) if block % 2 == 0 else (run_tuned, run_stock)
        for side in sides:
            side(steps)
    return paired(_slowest(stock_seconds[-blocks:]), _slowest(tuned_seconds[-blocks:]))


def _warmed(step: Callable[[], object], model: torch.nn.Module | None) -> str:
    """Run untimed steps with winners. Returns why none ran; empty if one did."""
    patch = open_patch(model)
    with patch, capture() as shapes:
        for _ in range(WARM_STEPS):
            step()
        ran = account(shapes.calls.total, steps=0).products
        return patch.why_nothing(runs_kernels=any(product.kernel for product in ran))


def paired(stock: Sequence[float], tuned: Sequence[float]) -> Ratio:
    """The median of stock ÷ tuned over all pairs, and its 95% interval by order statistics."""
    pairs = zip(stock, tuned, strict=True)
    ratios = sorted(stock_s / tuned_s for stock_s, tuned_s in pairs)
    n = len(ratios)
    # The median lies between the k-th smallest and k-th largest of n values with a probability of
    # 95% for k = n/2 - 1.96·√n/2, by the normal approximation of the binomial distribution.
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
    return [max(block) for block in zip(*_on_all_ranks(seconds), strict=True)]


def _on_all_ranks(value: T) -> list[T]:
    """The values of all ranks; the value of this process if there is no process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
