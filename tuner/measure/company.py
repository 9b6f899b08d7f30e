"""The time of a product between other kernels, as in a program.

If launches of one kernel follow each other, the prologue of one may overlap with the last wave of
the other, and operands are in L2 as that kernel leaves them. Between other kernels this is not so:
of 65536×128×512 in FP8 the winner of such rounds is 10% faster than cuBLAS's kernel, but 8% slower
between passes over memory (NVIDIA H200, 2026-11-22). So each contender is also timed with
elementwise passes over operands after each launch, which take about as long as the product itself.
Its time is the default's, plus what the whole takes longer than with the default's product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.graphs import TorchGraph
from tuner.measure.timing import FINAL_REPLAY_US, Timer, brief_us, launches_per_replay
from tuner.measure.torch_calls import captured_beside
from tuner.trial import Rounds
from tuner.workloads.operands import OperandSet

LEAST_SHARE = 0.01
"""A contender's time is at least this share of the default's: noise could make it negative."""

_SIGN = 0x80


def mixed_rounds(
    bench: Bench,
    contenders: Sequence[Prepared],
    baseline_us: float,
    timer: Timer,
    count: int,
    *,
    seed: int,
    announce: Callable[[int], None],
) -> Rounds:
    """`count` shuffled rounds of the contenders and the default, each between passes over memory.

    `baseline_us` is the time of the default's product; `announce` is as in `Timer.rounds`, with the
    default last. The operands are changed: nothing can be verified with them afterwards.

    Raises:
        CandidateFailed, ContextDead
    """
    sets = bench.operands.sets
    pass_us = _pass_us(bench, timer)
    passes = max(1, round(baseline_us / pass_us))

    def others(i: int) -> None:
        for j in range(passes):
            _pass_over(sets[(i * passes + j) % len(sets)])

    launches = launches_per_replay(baseline_us + passes * pass_us, len(sets), FINAL_REPLAY_US)
    counts = [launches] * (len(contenders) + 1)
    with captured_beside(bench, contenders, counts, others) as graphs:
        taken = timer.rounds(graphs, count, seed=seed, announce=announce)
    *wholes, default_wholes = taken.samples_us
    least = LEAST_SHARE * baseline_us
    return Rounds(
        samples_us=tuple(
            tuple(
                max(least, baseline_us + whole - default_whole)
                for whole, default_whole in zip(samples, default_wholes, strict=True)
            )
            for samples in wholes
        ),
        baseline_us=(baseline_us,) * len(default_wholes),
        conditions=conditions_of(taken.readings),
    )


def _pass_us(bench: Bench, timer: Timer) -> float:
    sets = bench.operands.sets
    return brief_us(timer, TorchGraph(bench.stream, len(sets), lambda i: _pass_over(sets[i])))


def _pass_over(operands: OperandSet) -> None:
    """Read and write all of a set, elementwise: only the signs change."""
    for x in (operands.a, operands.b, operands.d):
        if x.is_floating_point() and x.dtype.itemsize == 1:
            x.view(torch.uint8).bitwise_xor_(_SIGN)
        else:
            x.neg_()
