"""A product between other kernels, as in a program: what it adds to the whole.

Where launches of one kernel follow each other, one's prologue may hide behind the other's last
wave, and operands lie in L2 as that kernel leaves them. Neither holds between other kernels: of
65536×128×512 in FP8 the winner of such rounds is 10% faster than cuBLAS's kernel, and 8% slower
between passes over memory (NVIDIA H200, 2026-11-22). So each contender is also followed by
elementwise passes over operands that take about as long as the product itself. What the whole takes
longer than with cuBLAS's product in the contender's place is added to cuBLAS's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tuner.measure.baseline import captured_beside
from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.graphs import TorchGraph
from tuner.measure.timing import FINAL_REPLAY_US, Timer, brief_us, launches_per_replay
from tuner.trial import Rounds
from tuner.workloads.operands import OperandSet

LEAST_SHARE = 0.01
"""A contender's time is at least this share of cuBLAS's, whatever noise makes of it."""

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
    """`count` shuffled rounds of the contenders and cuBLAS, each between passes over memory.

    `baseline_us` is the time of cuBLAS's product, `announce` as in `Timer.rounds`, with cuBLAS the
    last. The operands are other ones afterwards: nothing can be verified with them any more.

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
    *wholes, reference = taken.samples_us
    least = LEAST_SHARE * baseline_us
    return Rounds(
        samples_us=tuple(
            tuple(
                max(least, baseline_us + whole - stock)
                for whole, stock in zip(mine, reference, strict=True)
            )
            for mine in wholes
        ),
        baseline_us=(baseline_us,) * len(reference),
        conditions=conditions_of(taken.readings),
    )


def _pass_us(bench: Bench, timer: Timer) -> float:
    sets = bench.operands.sets
    return brief_us(timer, TorchGraph(bench.stream, len(sets), lambda i: _pass_over(sets[i])))


def _pass_over(operands: OperandSet) -> None:
    """Read and write all of a set, elementwise: its signs change, and with them nothing else."""
    for x in (operands.a, operands.b, operands.d):
        if x.is_floating_point() and x.dtype.itemsize == 1:
            x.view(torch.uint8).bitwise_xor_(_SIGN)
        else:
            x.neg_()
