"""Backward products on the host: blocks, sums of rows, arguments. See also `test_epilogues`."""

from __future__ import annotations

import pytest

from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged, right_answer
from tuner.trial import FailureKind
from tuner.workloads import reference
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands, poison


@pytest.mark.parametrize("epilogue", ["dgelu_bgrad", "dsilu_gate_act"])
def test_blocks_of_rows_are_judged_alike(epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 4096)
    problem = Problem(m=96, n=80, k=208, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < 0.6


def test_the_bias_gradient_is_judged() -> None:
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_dgelu_tanh_bgrad")
    operands = Operands(problem, SMALL, HOST, seed=1)
    answer = right_answer(operands)
    wrong = answer.clone()
    wrong[0, 96] -= wrong[0, 5]  # a row that is left out
    _, failure = judged(operands, wrong)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    wrong = answer.clone()
    wrong[0, 40, 8:16] = 0
    _, failure = judged(operands, wrong)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    poison(wrong[0, 96:])
    _, failure = judged(operands, wrong)
    assert failure is not None
    assert failure.kind is FailureKind.UNTOUCHED


def test_arguments_say_where_everything_lies() -> None:
    m, n = 96, 80
    operands = Operands(
        Problem(m=m, n=n, k=208, dtype="bf16.then_dsilu_gate_act"), SMALL, HOST, seed=1
    )
    first = operands.sets[0]
    found = operands.arguments(first, operands.check)
    assert first.aux is not None
    assert (found.aux, found.ld_aux) == (first.aux.data_ptr(), 2 * n)
    assert (found.d, found.ldd) == (operands.check.data_ptr(), 3 * n)
    assert operands.check[1].data_ptr() == found.d + 2 * n  # up's gradient beside the gate's
    assert (found.activated, found.ld_activated) == (found.d + 4 * n, 3 * n)
    assert (found.bias_gradient, found.bias, found.residual) == (None, None, None)
    operands = Operands(
        Problem(m=m, n=n, k=208, dtype="bf16.then_dgelu_bgrad"), SMALL, HOST, seed=1
    )
    found = operands.arguments(operands.sets[0])
    assert (found.ldd, found.ld_aux, found.activated) == (n, n, None)
    assert found.bias_gradient == found.d + m * n * 2


def test_memory_of_a_set_and_of_what_lies_between() -> None:
    plain = footprint(Problem(m=128, n=256, k=512))
    bias = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_dgelu_bgrad"))
    gated = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_dsilu_gate_act"))
    assert (bias.d, bias.epilogue) == (plain.d, plain.d + 2 * 256)
    assert (gated.d, gated.epilogue) == (3 * plain.d, 2 * plain.d)
    assert gated.default > bias.default > 0
    assert gated.one_set == gated.a + gated.b + gated.d + gated.epilogue
