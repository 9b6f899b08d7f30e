"""Backward products: operands, all outputs' references, tolerance and torch's ways, on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Backward, Epilogue
from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged
from tuner.trial import FailureKind
from tuner.workloads import fused_ways, reference
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.registry import workload_of

BACKWARD = [epilogue for epilogue in Epilogue if epilogue.backward]
PROBLEMS = [
    *(Problem(m=96, n=80, k=208, dtype=f"bf16.then_{e}", layout="tt") for e in BACKWARD),  # type: ignore[arg-type]
    *(Problem(m=33, n=24, k=40, dtype=f"fp16.then_{e}") for e in BACKWARD),
    Problem(m=1, n=8, k=8, dtype="bf16.then_dsilu_gate_act"),
    Problem(m=1, n=8, k=8, dtype="bf16.then_dgelu_bgrad"),
]


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_ways, "COMPILER", "eager")
    yield
    torch._dynamo.reset()


def parts_of(problem: Problem) -> Backward:
    parts = problem.operation.epilogue.backward
    assert parts is not None
    return parts


def right_answer(operands: Operands) -> torch.Tensor:
    """By autograd in FP64."""
    s, parts, n = operands.sets[0], parts_of(operands.problem), operands.problem.n
    assert s.aux is not None
    aux = s.aux[0].double().requires_grad_()
    value = ACTIVATIONS[parts.activation](aux[:, :n])
    if parts.gated:
        value = value * aux[:, n:]
    (gradient,) = torch.autograd.grad(value, aux, s.a[0].double() @ s.b[0].double())
    if parts.bias_gradient:
        return torch.cat([gradient, gradient.sum(0, keepdim=True)])[None].to(s.d.dtype)
    outputs = [gradient[:, :n], gradient[:, n:]][: parts.halves]
    return torch.stack([*outputs, value.detach()][: len(s.d)]).to(s.d.dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.6 if problem.m > 1 else 0.9)


@pytest.mark.parametrize("epilogue", ["dgelu_bgrad", "dsilu_gate_act"])
def test_blocks_of_rows_are_judged_alike(epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 4096)
    problem = Problem(m=96, n=80, k=208, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < 0.6


@pytest.mark.parametrize("epilogue", BACKWARD)
def test_outputs_have_the_spread_that_is_said(epilogue: Epilogue) -> None:
    operands = Operands(
        Problem(m=32, n=320, k=200, dtype=f"bf16.then_{epilogue}"), SMALL, HOST, seed=1
    )
    deviation = right_answer(operands).double().square().mean((1, 2)).sqrt()
    (case,) = operands.cases
    assert len(deviation) == len(case.sigmas) == epilogue.outputs
    for measured, said in zip(deviation.tolist(), case.sigmas, strict=True):
        assert measured == pytest.approx(said, rel=0.15)
    first, second = operands.sets[:2]
    assert first.aux is not None
    assert second.aux is not None
    assert not torch.equal(first.aux, second.aux)


@pytest.mark.parametrize("epilogue", ["drelu2_act", "dsilu_gate", "dgelu_tanh_gate_act"])
def test_each_output_is_judged_by_itself(epilogue: str) -> None:
    problem = Problem(m=96, n=80, k=208, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    answer = right_answer(operands)
    for output in range(len(answer)):
        wrong = answer.clone()
        wrong[output] *= 1.02
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG
        poison(wrong[output, :1])
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.UNTOUCHED


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
    filled = operands.arguments(first, operands.check)
    assert first.aux is not None
    assert (filled.aux, filled.ld_aux) == (first.aux.data_ptr(), 2 * n)
    assert (filled.d, filled.ldd) == (operands.check.data_ptr(), 3 * n)
    assert operands.check[1].data_ptr() == filled.d + 2 * n  # up's gradient beside the gate's
    assert (filled.activated, filled.ld_activated) == (filled.d + 4 * n, 3 * n)
    assert (filled.bias_gradient, filled.bias, filled.residual) == (None, None, None)
    operands = Operands(
        Problem(m=m, n=n, k=208, dtype="bf16.then_dgelu_bgrad"), SMALL, HOST, seed=1
    )
    filled = operands.arguments(operands.sets[0])
    assert (filled.ldd, filled.ld_aux, filled.activated) == (n, n, None)
    assert filled.bias_gradient == filled.d + m * n * 2


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_torchs_ways_compute_the_operation(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    wanted = right_answer(operands).double()
    workload = workload_of(problem.operation)
    (default,) = workload.defaults(problem)
    for way in (default, *workload.alternatives(problem)):
        s = operands.sets[0]
        s.d.zero_()
        result = way.launches(problem, operands.sets, operands.room)[0]().double()
        rows = len(result)
        assert rows >= problem.m
        assert _error(result, wanted[0, :rows]) < 2e-2, way.name
        if way is default and not parts_of(problem).gated:
            assert _error(s.d.double(), wanted) < 2e-2


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.parametrize(
    ("epilogue", "default", "rivals"),
    [
        ("dgelu_tanh", "torch.mm, then gelu_backward", []),
        ("dgelu_act", "torch.mm, then gelu_backward, then the activation", []),
        ("drelu2_bgrad", "torch.mm, then relu and mul, then sum", []),
        (
            "dsilu_gate_act",
            "torch.mm, then mul twice, then silu_backward, then the activation and mul",
            ["gate and up apart"],
        ),
    ],
)
def test_what_programs_run(epilogue: str, default: str, rivals: list[str]) -> None:
    problem = Problem(m=64, n=64, k=64, dtype=f"bf16.then_{epilogue}")
    workload = workload_of(problem.operation)
    assert workload.defaults(problem)[0].name == default
    found = list(workload.alternatives(problem))
    named = ["torch.compile of the same", *(f"{default}, {rival}" for rival in rivals)]
    assert [way.name for way in found] == named
    assert all(way.rival and way.is_to_be_beaten for way in found)


def test_memory_of_a_set_and_of_what_lies_between() -> None:
    plain = footprint(Problem(m=128, n=256, k=512))
    bias = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_dgelu_bgrad"))
    gated = footprint(Problem(m=128, n=256, k=512, dtype="bf16.then_dsilu_gate_act"))
    assert (bias.d, bias.epilogue) == (plain.d, plain.d + 2 * 256)
    assert (gated.d, gated.epilogue) == (3 * plain.d, 2 * plain.d)
    assert gated.default > bias.default > 0
    assert gated.one_set == gated.a + gated.b + gated.d + gated.epilogue
