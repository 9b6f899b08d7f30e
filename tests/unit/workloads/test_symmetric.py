"""Symmetric products on the host: operands, reference, default, and what the verifier finds."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged
from tuner.trial import FailureKind
from tuner.workloads import ways
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.registry import WORKLOADS

PROBLEMS = [
    Problem(n, n, k, batch=batch, dtype=f"{dtype}.symmetric", layout=layout)
    for dtype in ("bf16", "fp16")
    for layout in ("tn", "nt")
    for n, k, batch in ((96, 200, 1), (8, 8, 1), (24, 1000, 3), (1, 1, 1))
]
EVERY = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


def drawn(problem: Problem) -> Operands:
    return Operands(problem, SMALL, HOST, seed=1)


def right_answer(operands: Operands) -> torch.Tensor:
    a = operands.sets[0].a.double()
    return torch.bmm(a, a.mT).to(operands.check.dtype)


@EVERY
def test_the_right_answer_passes(problem: Problem) -> None:
    assert sum(workload.covers(problem.operation) for workload in WORKLOADS) == 1
    operands = drawn(problem)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.5 if problem.n > 1 else 0.9)


@EVERY
def test_the_c_abi_gets_one_matrix(problem: Problem) -> None:
    operands = drawn(problem)
    for each in operands.sets:
        given = operands.arguments(each)
        assert (given.a, given.lda, given.batch_stride_a) == (
            given.b,
            given.ldb,
            given.batch_stride_b,
        )
        assert torch.equal(each.b, each.a.mT)
    assert footprint(problem).b == 0


@EVERY
def test_the_default_computes_all_of_it(problem: Problem) -> None:
    operands = drawn(problem)
    wanted = right_answer(operands)
    defaults = operands.workload.defaults(problem)
    name, (launch, *_) = ways.first_that_runs(defaults, problem, operands.sets, operands.room)
    assert name == ("torch.bmm" if problem.batch > 1 else "torch.mm")
    torch.testing.assert_close(launch().reshape(wanted.shape), wanted, rtol=2e-2, atol=2e-2)


def test_outputs_have_the_spread_that_is_said() -> None:
    operands = drawn(Problem(256, 256, 4096, dtype="bf16.symmetric"))
    d = right_answer(operands).double()
    assert (d**2).mean().sqrt() / operands.sigma == pytest.approx(1, rel=0.1)
    assert d[0].tril(-1)[d[0].tril(-1) != 0].std() == pytest.approx(1, rel=0.1)


def test_one_bit_across_the_diagonal_is_a_failure() -> None:
    operands = drawn(Problem(96, 96, 200, dtype="bf16.symmetric"))
    answer = right_answer(operands)
    answer.view(torch.int16)[0, 5, 3] ^= 1
    _, failure = judged(operands, answer)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    assert failure.message == "1 elements differ from those across the diagonal"


def test_a_half_that_is_missing_or_wrong_is_a_failure() -> None:
    operands = drawn(Problem(96, 96, 200, batch=2, dtype="fp16.symmetric"))
    answer = right_answer(operands)
    for wrong in (answer.tril(), answer.flip(0), answer * 1.01):
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG
