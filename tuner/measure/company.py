"""A product among other work at the GPU's power limit: what it costs a program, not what it takes.

Rounds that shuffle short samples share one clock, so a kernel that draws more power than cuBLAS's
slows all alike and does not pay. In a program at the power limit it does: every other kernel runs
at the lower clock that it leaves. Of a GPT's seven products that were faster by 1 to 8% in such
rounds, alone at the power limit each ran at a clock 10 to 20% lower than cuBLAS's, and the whole
step became slower (NVIDIA H200, 2026-11-22).

So each contender is put where programs have it: followed by cuBLAS's product of the same problem
and by passes over operands that take as long as one product, for so long that the clock is its own.
What the whole takes longer than with cuBLAS's product in the contender's place is the contender's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from tuner.measure.baseline import Baseline
from tuner.measure.bench import Bench, Prepared
from tuner.measure.conditions import conditions_of
from tuner.measure.graphs import Replay, TorchGraph
from tuner.measure.operands import OperandSet
from tuner.measure.timing import Timer, launches_per_replay
from tuner.trial import Rounds

PLACES = 2
"""How many contenders are put to this test: each takes a turn of every round."""

ROUNDS = 10
REPLAY_US = 3000.0
ESTIMATE_REPLAYS = 3
_SIGN = 0x80

POWER_LIMITED = 0.97
"""The GPU is at its power limit where its clock is below this share of the rested one."""

LEAST_SHARE = 0.01
"""A contender's time is at least this share of cuBLAS's, whatever noise makes of it."""


def is_power_limited(sustained: Rounds, rested: Rounds) -> bool:
    """Whether the clock fell under sustained work; False where NVML does not say."""
    clock = sustained.conditions.sm_clock_mhz
    return 0 < clock < POWER_LIMITED * rested.conditions.sm_clock_mhz


def invited(sustained: Rounds, rested: Rounds, tiles: Sequence[int]) -> list[int]:
    """Which candidates are worth a turn: the fastest of those that gain on cuBLAS in both states.

    And the fastest of those with larger tiles than that one: they read less from L2 for the same
    product, and draw less power. `tiles[i]` is candidate i's tile's area.
    """
    states = (sustained, rested)

    def gain(i: int) -> float:
        ratios = [median(state.baseline_us) / median(state.samples_us[i]) for state in states]
        return ratios[0] * ratios[1] if min(ratios) > 1.0 else 0.0

    gains = {i: found for i in range(len(tiles)) if (found := gain(i))}
    if not gains:
        return []
    first = max(gains, key=gains.__getitem__)
    larger = [i for i in gains if tiles[i] > tiles[first]]
    return [first, *sorted(larger, key=gains.__getitem__, reverse=True)][:PLACES]


def mixed_rounds(
    bench: Bench,
    contenders: Sequence[Prepared],
    baseline_us: float,
    timer: Timer,
    *,
    seed: int,
    announce: Callable[[int], None],
) -> Rounds:
    """Turns of each contender among other work, and of cuBLAS's product in its place.

    `baseline_us` is the time of cuBLAS's product, `announce` as in `Timer.turns`, with cuBLAS the
    last. The operands are other ones afterwards: nothing can be verified with them any more.

    Raises:
        CandidateFailed, ContextDead
    """
    baseline = Baseline(bench.operands, bench.stream)
    sets = bench.operands.sets
    pass_us = _pass_us(bench, timer)
    passes = max(1, round(baseline_us / pass_us))

    def others(i: int) -> None:
        baseline.launch(i + 1)
        for j in range(passes):
            _pass_over(sets[(i * passes + j) % len(sets)])

    whole_us = 2 * baseline_us + passes * pass_us
    launches = launches_per_replay(whole_us, bench.set_count, REPLAY_US)
    graphs: list[Replay] = []
    try:
        graphs += [bench.capture(contender, launches, others) for contender in contenders]
        graphs.append(baseline.capture(launches, others))
        lengths = [launches * whole_us] * len(graphs)
        taken = timer.turns(graphs, lengths, ROUNDS, seed=seed, announce=announce)
    finally:
        for graph in graphs:
            graph.close()
    *times, reference = taken.samples_us
    least = LEAST_SHARE * baseline_us
    return Rounds(
        samples_us=tuple(
            tuple(
                max(least, baseline_us + whole - stock)
                for whole, stock in zip(mine, reference, strict=True)
            )
            for mine in times
        ),
        baseline_us=(baseline_us,) * len(reference),
        conditions=conditions_of(taken.readings),
    )


def _pass_us(bench: Bench, timer: Timer) -> float:
    sets = bench.operands.sets
    graph = TorchGraph(bench.stream, len(sets), lambda i: _pass_over(sets[i]))
    try:
        return median(timer.screen(graph, ESTIMATE_REPLAYS, float("inf")))
    finally:
        graph.close()


def _pass_over(operands: OperandSet) -> None:
    """Read and write all of a set, elementwise: its signs change, and with them nothing else."""
    for x in (operands.a, operands.b, operands.d):
        if x.dtype.itemsize == 1:
            x.view(torch.uint8).bitwise_xor_(_SIGN)
        else:
            x.neg_()
