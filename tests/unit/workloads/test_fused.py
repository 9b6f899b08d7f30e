"""Fused products on the host: factors, mistakes, arguments, memory. See also `test_epilogues`."""

from __future__ import annotations

import math

import pytest
import torch

from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged, right_answer
from tuner.trial import FailureKind
from tuner.workloads.footprint import footprint
from tuner.workloads.fused import spread
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.reference import tolerance


def test_factors_are_those_of_trained_layers() -> None:
    columns = Problem(m=32, n=4096, k=64, dtype="bf16.then_scale_residual")
    factors = Operands(columns, SMALL, HOST, seed=1).sets[0].column_scale
    assert factors is not None
    assert (factors.dtype, factors.shape) == (torch.bfloat16, (1, 1, 4096))
    assert 0.1 < factors.abs().min() < factors.abs().max() < 1.2
    assert 0.4 < (factors < 0).double().mean() < 0.6
    rows = Problem(m=4096, n=32, k=64, dtype="fp16.then_row_scale")
    factors = Operands(rows, SMALL, HOST, seed=1).sets[0].row_scale
    assert factors is not None
    assert (factors.dtype, factors.shape) == (torch.float32, (1, 4096, 1))
    assert 0.2 < factors.min() < 1 < factors.max() < 4


@pytest.mark.parametrize(
    ("dtype", "left_out"),
    [
        ("bf16.then_bias_gelu", "bias"),
        ("bf16.then_bias_residual", "residual"),
        ("bf16.then_bias_scale_residual", "bias"),
        ("bf16.then_bias_scale_residual", "column_scale"),
        ("bf16.then_row_scale_bias", "row_scale"),
        ("bf16.then_row_scale_bias", "bias"),
    ],
)
def test_what_is_left_out_is_caught(dtype: str, left_out: str) -> None:
    problem = Problem(m=96, n=80, k=208, dtype=dtype)
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    kept = getattr(first, left_out).clone()
    getattr(first, left_out).zero_()
    answer = right_answer(operands)
    getattr(first, left_out).copy_(kept)
    _, failure = judged(operands, answer)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_fast_sums_are_allowed_for() -> None:
    of = {
        dtype: tolerance(
            Problem(m=64, n=64, k=8192, dtype=dtype), fast_accumulation=dtype.startswith("fp8")
        ).error
        for dtype in ("fp8_e4m3", "fp8_e4m3.then_bias_gelu", "bf16", "bf16.then_bias_gelu")
    }
    assert of["fp8_e4m3"] < of["fp8_e4m3.then_bias_gelu"] < 1.25 * of["fp8_e4m3"]
    assert of["bf16"] == of["bf16.then_bias_gelu"]


def test_spread_of_an_activation() -> None:
    relu2 = Operation.of("bf16", epilogue="bias_relu2").epilogue.activation
    assert relu2 is not None
    assert spread(relu2, 1.0) == pytest.approx(math.sqrt(1.5), rel=1e-3)


def test_arguments_say_where_everything_lies() -> None:
    problem = Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_bias_gelu_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    found = operands.arguments(first, operands.check)
    assert first.bias is not None
    assert first.scale_a is not None
    assert found.bias == first.bias.data_ptr()
    assert found.d == operands.check[0].data_ptr()
    assert found.aux == operands.check[1].data_ptr() == found.d + 96 * 80 * 2
    assert (found.ld_aux, found.beta, found.residual) == (80, 0.0, None)
    assert found.scale_a == first.scale_a.data_ptr()
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_residual")
    operands = Operands(problem, SMALL, HOST, seed=1)
    residual = operands.sets[0].residual
    assert residual is not None
    found = operands.arguments(operands.sets[0])
    assert (found.residual, found.ld_residual) == (residual.data_ptr(), 80)
    assert (found.bias, found.aux) == (None, None)


def test_arguments_say_where_factors_lie() -> None:
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_scale_residual_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    found = operands.arguments(first)
    assert first.column_scale is not None
    assert (found.column_scale, found.row_scale) == (first.column_scale.data_ptr(), None)
    assert (found.aux, found.ld_aux) == (first.d[1].data_ptr(), 80)
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_row_scale")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    found = operands.arguments(first)
    assert first.row_scale is not None
    assert (found.row_scale, found.column_scale) == (first.row_scale.data_ptr(), None)


def test_memory_of_a_set_and_of_what_lies_between() -> None:
    plain = footprint(Problem(m=128, n=256, k=512))
    aux = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_bias_gelu_aux"))
    residual = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_residual"))
    assert (aux.d, aux.epilogue) == (2 * plain.d, 512)
    assert (residual.d, residual.epilogue) == (plain.d, plain.d)
    assert plain.epilogue == plain.default == 0
    scaled = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_bias_scale_residual"))
    assert scaled.epilogue == 2 * 512 + plain.d
    rows = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_row_scale_bias"))
    assert rows.epilogue == 512 + 512
    assert aux.default > 0
    assert aux.one_set == aux.a + aux.b + aux.d + aux.epilogue
