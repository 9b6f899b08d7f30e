"""Fused products: operands, both outputs' references, tolerance and torch's ways, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.operation import Epilogue, Operation
from gemmsmith.core.problem import Problem
from tests.support.epilogues import FUSED
from tests.support.judging import SMALL, judged
from tuner.trial import FailureKind
from tuner.workloads import fused_ways, ways
from tuner.workloads.footprint import footprint
from tuner.workloads.fused import spread
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.reference import tolerance
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Way

PROBLEMS = [
    *(Problem(m=96, n=80, k=208, dtype=f"bf16.then_{epilogue}") for epilogue in FUSED),
    *(Problem(m=33, n=24, k=40, dtype=f"fp16.then_{epilogue}") for epilogue in FUSED),
    Problem(m=96, n=80, k=208, dtype="bf16.then_bias_residual", layout="tt"),  # type: ignore[arg-type]
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_bias_silu_aux"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_residual"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_bias_scale_residual_aux"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_row_scale_bias"),
    Problem(m=1, n=8, k=8, dtype="bf16.then_bias_gelu"),
]


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_ways, "COMPILER", "eager")
    yield
    torch._dynamo.reset()


def right_answer(operands: Operands) -> torch.Tensor:
    """By FP64 and torch's functions, [1 or 2, M, N]."""
    s, epilogue = operands.sets[0], operands.problem.operation.epilogue
    x = torch.bmm(s.a.double(), s.b.double())
    for factor in (s.scale_a, s.scale_b):
        x = x if factor is None else x * factor.double()
    x = x if s.row_scale is None else x * s.row_scale.double()
    x = x if s.bias is None else x + s.bias.double()
    y = {
        None: x,
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "gelu": functional.gelu(x),
        "silu": x / (1 + torch.exp(-x)),
        "relu2": x.clamp(min=0) ** 2,
    }[epilogue.activation]
    y = y if s.column_scale is None else y * s.column_scale.double()
    y = y if s.residual is None else y + s.residual.double()
    return (torch.cat([y, x]) if epilogue.stores_aux else y).to(s.d.dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.6 if problem.m > 1 else 0.9)


@pytest.mark.parametrize("epilogue", FUSED)
def test_outputs_have_the_spread_that_is_said(epilogue: Epilogue) -> None:
    operands = Operands(
        Problem(m=32, n=320, k=200, dtype=f"bf16.then_{epilogue}"), SMALL, HOST, seed=1
    )
    deviation = right_answer(operands).double().square().mean((1, 2)).sqrt()
    (case,) = operands.cases
    assert len(deviation) == len(case.sigmas) == 1 + epilogue.stores_aux
    for measured, said in zip(deviation.tolist(), case.sigmas, strict=True):
        assert measured == pytest.approx(said, rel=0.15)
    first, second = operands.sets[:2]
    for vector in ("bias", "row_scale", "column_scale"):
        mine, others = getattr(first, vector), getattr(second, vector)
        assert (mine is None) is (others is None)
        assert mine is None or not torch.equal(mine, others)


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


def test_each_output_is_judged_by_itself() -> None:
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_bias_relu2_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    answer = right_answer(operands)
    for output in (0, 1):
        wrong = answer.clone()
        wrong[output] *= 1.02
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG
        poison(wrong[output, :1])
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.UNTOUCHED


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
    filled = operands.arguments(first, operands.check)
    assert first.bias is not None
    assert first.scale_a is not None
    assert filled.bias == first.bias.data_ptr()
    assert filled.d == operands.check[0].data_ptr()
    assert filled.aux == operands.check[1].data_ptr() == filled.d + 96 * 80 * 2
    assert (filled.ld_aux, filled.beta, filled.residual) == (80, 0.0, None)
    assert filled.scale_a == first.scale_a.data_ptr()
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_residual")
    operands = Operands(problem, SMALL, HOST, seed=1)
    residual = operands.sets[0].residual
    assert residual is not None
    filled = operands.arguments(operands.sets[0])
    assert (filled.residual, filled.ld_residual) == (residual.data_ptr(), 80)
    assert (filled.bias, filled.aux) == (None, None)


def test_arguments_say_where_factors_lie() -> None:
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_scale_residual_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    filled = operands.arguments(first)
    assert first.column_scale is not None
    assert (filled.column_scale, filled.row_scale) == (first.column_scale.data_ptr(), None)
    assert (filled.aux, filled.ld_aux) == (first.d[1].data_ptr(), 80)
    problem = Problem(m=96, n=80, k=208, dtype="bf16.then_row_scale")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    filled = operands.arguments(first)
    assert first.row_scale is not None
    assert (filled.row_scale, filled.column_scale) == (first.row_scale.data_ptr(), None)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_torchs_ways_compute_the_operation(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    wanted = right_answer(operands).double()
    workload = workload_of(problem.operation)
    name, _ = ways.first_that_runs(
        workload.defaults(problem), problem, operands.sets, operands.room
    )
    default = next(way for way in workload.defaults(problem) if way.name == name)
    for way in (default, *workload.alternatives(problem)):
        s = operands.sets[0]
        s.d.zero_()
        result = way.launches(problem, operands.sets, operands.room)[0]().double()
        if "bf16 copies" in way.name:
            continue  # the user multiplies by the factors at some other place
        assert _error(result, wanted[0]) < 1e-2, way.name
        if problem.operation.epilogue.stores_aux and way is default:
            assert _error(s.d[1].double(), wanted[1]) < 1e-2


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.parametrize(
    ("dtype", "default", "rivals"),
    [
        ("bf16.then_bias", "torch.addmm", []),
        (
            "bf16.then_bias_gelu_tanh",
            "torch.addmm, then gelu",
            ["torch.compile of the same", "torch._addmm_activation"],
        ),
        (
            "fp16.then_bias_relu2_aux",
            "torch.addmm, then relu and square",
            ["torch.compile of the same"],
        ),
        (
            "bf16.then_residual",
            "torch.mm, then add",
            ["torch.compile of the same", "torch.addmm of the residual"],
        ),
        (
            "fp8_e4m3.then_bias_residual",
            "torch._scaled_mm, then add",
            ["torch.compile of the same"],
        ),
        (
            "bf16.then_bias_scale_residual_aux",
            "torch.addmm, then mul, then add",
            ["torch.compile of the same", "torch.addmm, then addcmul"],
        ),
        ("bf16.then_row_scale", "torch.mm, then mul", ["torch.compile of the same"]),
        (
            "fp16.then_row_scale_bias",
            "torch.mm, then mul, then add",
            ["torch.compile of the same", "torch.mm, then addcmul"],
        ),
        (
            "fp8_e4m3.then_scale_residual",
            "torch._scaled_mm, then mul, then add",
            ["torch.compile of the same", "torch._scaled_mm, then addcmul"],
        ),
        (
            "fp8_e4m3.then_row_scale",
            "torch._scaled_mm, then mul",
            ["torch.compile of the same", "torch._scaled_mm with factors of rows"],
        ),
    ],
)
def test_what_programs_run(dtype: str, default: str, rivals: list[str]) -> None:
    problem = Problem(m=64, n=64, k=64, dtype=dtype)
    workload = workload_of(problem.operation)
    assert workload.defaults(problem)[0].name == default
    found: list[Way] = list(workload.alternatives(problem))
    assert [way.name for way in found] == rivals
    assert all(way.rival and way.is_to_be_beaten for way in found)


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
