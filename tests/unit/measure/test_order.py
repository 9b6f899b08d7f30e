"""Bits of rows, for all operations that may demand an order: who has them, and who fails.

Kernels are played by exact products on the host, which give a row the same bits at every M.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.candidates import named
from tests.support.judging import SMALL
from tuner.measure.order import FEWEST, RowBits, Run
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import HOST, Operands, bits
from tuner.workloads.workload import Block, OperandSet

OPERATIONS = (
    *(f"bf16.sum_sequential.{layout}" for layout in ("tn", "tt", "nt", "nn")),
    "fp16.sum_split_2.tn",
    "bf16.out_f32.sum_sequential.nn",
    "bf16.out_f32.accumulate.sum_sequential.nt",
    "bf16.out_f32.accumulate.sum_sequential.tn",
    "bf16.then_bias_gelu_aux.sum_sequential.tn",
    "bf16.then_bias_residual.sum_sequential.tt",
    "bf16.then_row_scale_bias.sum_sequential.tn",
    "bf16.then_silu_gate.sum_sequential.tn",
    "bf16.then_silu_gate_aux.sum_sequential.tn",
    "bf16.then_dgelu_act.sum_sequential.tt",
    "bf16.then_dsilu_gate_act.sum_sequential.tt",
    "fp8_e4m3.scale_row.sum_promoted.tn",
    "fp8_e5m2.scale_row.sum_sequential.tn",
)
BATCHED = ("bf16.sum_sequential.tn", "bf16.sum_sequential.nt", "fp8_e4m3.scale_row.sum_promoted.tn")
PROBLEMS = (
    *(Problem.of(Operation.parse(key), m, 16, 32) for key in OPERATIONS for m in (1, 24, 250)),
    *(Problem.of(Operation.parse(key), 10, 16, 32, 3) for key in BATCHED),
)


def exact(operands: Operands, problem: Problem, launched: OperandSet) -> None:
    """Write the exact result, rounded once, as a kernel does: it reads and adds to D."""
    d = launched.d
    whole = Block(batches=slice(0, len(d)), rows=slice(0, d.shape[1]), columns=slice(0, d.shape[2]))
    result = operands.workload.product(problem, launched, whole)
    if problem.operation.accumulate:
        result = result + d
    d.copy_(result)


def judged(
    problem: Problem, *spoils: Callable[[Problem, torch.Tensor], None]
) -> list[Failure | None]:
    """The verdicts on candidates in turn; each spoils the output of every launch in its way."""
    operands = Operands(problem, SMALL, HOST, seed=3)
    order = RowBits(operands, seed=3)
    case = operands.cases[0].operands
    verdicts = []
    for i, spoil in enumerate(spoils):

        def run(here: Problem, launched: OperandSet) -> None:
            exact(operands, here, launched)
            spoil(here, launched.d)  # noqa: B023 - called before the next

        candidate: Candidate = named(f"c{i}")
        operands.ready(case.d)
        play: Run = run
        play(problem, case)
        verdicts.append(order.failure(candidate, play))
    return verdicts


def right(_: Problem, __: torch.Tensor) -> None:
    """No other bits."""


def flips(where: tuple[int | slice, ...]) -> Callable[[Problem, torch.Tensor], None]:
    def spoil(_: Problem, d: torch.Tensor) -> None:
        bits(d)[where] ^= 1

    return spoil


def flips_with_few_rows(problem: Problem, d: torch.Tensor) -> None:
    if problem.m < FEWEST // 2:
        bits(d)[:, :, 1] ^= 1


def flips_where_rows_lie(_: Problem, d: torch.Tensor) -> None:
    bits(d)[:, 0, 1] ^= 1


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equal_bits_pass_and_others_fail(problem: Problem) -> None:
    other = flips((slice(None), slice(None), 3))
    verdicts = judged(problem, right, right, flips_with_few_rows, flips_where_rows_lie, other)
    assert verdicts[:2] == [None, None]
    for verdict in verdicts[2:]:
        assert verdict is not None
        assert verdict.kind is FailureKind.OTHER_BITS
    messages = [verdict.message for verdict in verdicts if verdict]
    assert "bits depend on M or on the row" in messages[1]
    assert messages[2].endswith("which adds in the same order, sequential")


def test_every_matrix_of_the_output_is_compared() -> None:
    """Aux and a second gradient have the bits of the order, too."""
    for key in OPERATIONS:
        problem = Problem.of(Operation.parse(key), 24, 16, 32)
        if problem.operation.epilogue.outputs > 1:
            last = flips((-1, -1, 0))
            assert judged(problem, right, last)[1] is not None, key


def test_few_rows_are_computed_among_more() -> None:
    """At M = 1 as well: there the whole launch itself is the one with few rows."""
    problem = Problem(1, 16, 32, dtype="bf16.sum_sequential")
    (verdict,) = judged(problem, flips_with_few_rows)
    assert verdict is not None
