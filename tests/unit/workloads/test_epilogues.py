"""Products with an epilogue on the host: references and spreads of all outputs, torch's ways."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from tests.support.epilogues import BACKWARD, FUSED, GATED
from tests.support.judging import SMALL, judged, right_answer
from tuner.trial import FailureKind
from tuner.workloads import ways
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.registry import workload_of

pytestmark = pytest.mark.usefixtures("uncompiled")

PROBLEMS = [
    *(Problem(m=96, n=80, k=208, dtype=f"bf16.then_{epilogue}") for epilogue in FUSED),
    *(Problem(m=33, n=24, k=40, dtype=f"fp16.then_{epilogue}") for epilogue in FUSED),
    Problem(m=96, n=80, k=208, dtype="bf16.then_bias_residual", layout="tt"),  # type: ignore[arg-type]
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_bias_silu_aux"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_residual"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_bias_scale_residual_aux"),
    Problem(m=96, n=80, k=208, dtype="fp8_e4m3.then_row_scale_bias"),
    Problem(m=1, n=8, k=8, dtype="bf16.then_bias_gelu"),
    *(Problem(m=96, n=160, k=208, dtype=f"bf16.then_{epilogue}") for epilogue in GATED),
    *(Problem(m=33, n=48, k=40, dtype=f"fp16.then_{epilogue}") for epilogue in GATED),
    Problem(m=96, n=160, k=208, dtype="fp8_e4m3.then_silu_gate_aux"),
    Problem(m=1, n=16, k=8, dtype="bf16.then_silu_gate"),
    *(Problem(m=96, n=80, k=208, dtype=f"bf16.then_{e}", layout="tt") for e in BACKWARD),  # type: ignore[arg-type]
    *(Problem(m=33, n=24, k=40, dtype=f"fp16.then_{e}") for e in BACKWARD),
    Problem(m=1, n=8, k=8, dtype="bf16.then_dsilu_gate_act"),
    Problem(m=1, n=8, k=8, dtype="bf16.then_dgelu_bgrad"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.6 if problem.m > 1 else 0.9)


@pytest.mark.parametrize("epilogue", [*FUSED, *GATED, *BACKWARD])
def test_outputs_have_the_spread_that_is_said(epilogue: Epilogue) -> None:
    problem = Problem(m=32, n=320, k=200, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    measured = right_answer(operands).double().square().mean((1, 2)).sqrt()
    (case,) = operands.cases
    assert len(measured) == len(case.sigmas) == epilogue.outputs
    assert measured.tolist() == pytest.approx(case.sigmas, rel=0.15)
    first, second = operands.sets[:2]
    for field in ("bias", "row_scale", "column_scale", "aux"):
        mine, others = getattr(first, field), getattr(second, field)
        assert (mine is None) is (others is None)
        assert mine is None or not torch.equal(mine, others)


@pytest.mark.parametrize(
    "epilogue",
    ["bias_relu2_aux", "silu_gate_aux", "drelu2_act", "dsilu_gate", "dgelu_tanh_gate_act"],
)
def test_each_output_is_judged_by_itself(epilogue: str) -> None:
    problem = Problem(m=96, n=160, k=208, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    answer = right_answer(operands)
    assert len(answer) > 1
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


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_torchs_ways_compute_the_operation(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    right = right_answer(operands).double()
    workload, epilogue = workload_of(problem.operation), problem.operation.epilogue
    parts = epilogue.backward
    bound = 2e-2 if parts or epilogue.is_gated else 1e-2
    defaults = workload.defaults(problem)
    name, _ = ways.first_that_runs(defaults, problem, operands.sets, operands.room)
    default = next(way for way in defaults if way.name == name)
    for way in (default, *workload.alternatives(problem)):
        first = operands.sets[0]
        first.d.zero_()
        output = way.launches(problem, operands.sets, operands.room)[0]()
        if "bf16 copies" in way.name:
            continue  # the user multiplies by the factors at some other place
        rows = len(output) if parts else problem.m
        assert rows >= problem.m
        assert output.shape == (rows, problem.columns)
        assert _error(output, right[0, :rows]) < bound, way.name
        if way is default and epilogue.stores_aux:
            assert _error(first.d[1:], right[1:]) < bound
        if way is default and parts and not parts.gated:
            assert _error(first.d, right) < bound


def _error(output: torch.Tensor, right: torch.Tensor) -> float:
    return float((output.double() - right).norm() / right.norm())


DSILU_GATE = "torch.mm, then mul twice, then silu_backward, then the activation and mul"


@pytest.mark.parametrize(
    ("dtype", "default", "rivals"),
    [
        ("bf16.then_bias", "torch.addmm", []),
        ("bf16.then_bias_gelu_tanh", "torch.addmm, then gelu", ["", "torch._addmm_activation"]),
        ("fp16.then_bias_relu2_aux", "torch.addmm, then relu and square", [""]),
        ("bf16.then_residual", "torch.mm, then add", ["", "torch.addmm of the residual"]),
        ("fp8_e4m3.then_bias_residual", "torch._scaled_mm, then add", [""]),
        (
            "bf16.then_bias_scale_residual_aux",
            "torch.addmm, then mul, then add",
            ["", "torch.addmm, then addcmul"],
        ),
        ("bf16.then_row_scale", "torch.mm, then mul", [""]),
        (
            "fp16.then_row_scale_bias",
            "torch.mm, then mul, then add",
            ["", "torch.mm, then addcmul"],
        ),
        (
            "fp8_e4m3.then_scale_residual",
            "torch._scaled_mm, then mul, then add",
            ["", "torch._scaled_mm, then addcmul"],
        ),
        (
            "fp8_e4m3.then_row_scale",
            "torch._scaled_mm, then mul",
            ["", "torch._scaled_mm with factors of rows"],
        ),
        (
            "bf16.then_silu_gate",
            "torch.mm, then silu and mul",
            ["", "torch.mm twice, then silu and mul", "torch.compile of two products"],
        ),
        ("fp8_e4m3.then_gelu_gate_aux", "torch._scaled_mm, then gelu and mul", [""]),
        ("bf16.then_dgelu_tanh", "torch.mm, then gelu_backward", [""]),
        ("bf16.then_dgelu_act", "torch.mm, then gelu_backward, then the activation", [""]),
        ("bf16.then_drelu2_bgrad", "torch.mm, then relu and mul, then sum", [""]),
        ("bf16.then_dsilu_gate_act", DSILU_GATE, ["", f"{DSILU_GATE}, gate and up apart"]),
        ("fp8_e4m3.out_e4m3.then_bias_gelu", None, [""]),
        ("fp8_e4m3.out_e4m3.then_silu_gate", None, [""]),
        (
            "fp8_e4m3.out_e4m3.then_bias",
            None,
            ["", "torch._scaled_mm into FP8, without amax"],
        ),
    ],
)
def test_what_programs_run(dtype: str, default: str | None, rivals: list[str]) -> None:
    """An empty name stands for the default's calls through torch.compile."""
    problem = Problem(m=64, n=64, k=64, dtype=dtype)
    workload = workload_of(problem.operation)
    assert default in (None, workload.defaults(problem)[0].name)
    alternatives = list(workload.alternatives(problem))
    names = [name or "torch.compile of the same" for name in rivals]
    assert [way.name for way in alternatives] == names
    assert all(way.rival and way.is_to_be_beaten for way in alternatives)
