"""FP8 outputs: their factor, both outputs' references and tolerances, and torch's ways."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, exact, judged
from tuner.trial import FailureKind
from tuner.workloads import ways
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.reference import tolerance
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import drawn_with

FP8 = torch.float8_e4m3fn
EPILOGUES = ("bias", "bias_gelu_tanh", "bias_gelu", "bias_silu", "bias_relu2", "silu_gate")


def asked(epilogue: str, m: int = 96, n: int = 160, k: int = 208) -> Problem:
    return Problem(m=m, n=n, k=k, dtype=f"fp8_e4m3.out_e4m3.then_{epilogue}")


def answer(operands: Operands, value: torch.Tensor) -> torch.Tensor:
    """D of it; the largest value is left as a right kernel does."""
    s = operands.sets[0]
    drawn_with(s.amax).fill_(float(value.abs().max()))
    return (value * drawn_with(s.scale_d).double()).clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("extents", [(96, 160, 208), (1, 32, 16)])
def test_the_right_answer_passes(epilogue: str, extents: tuple[int, int, int]) -> None:
    operands = Operands(asked(epilogue, *extents), SMALL, HOST, seed=1)
    share, failure = judged(operands, answer(operands, exact(operands)))
    assert failure is None
    assert share < (0.75 if extents[0] > 1 else 1.0)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_values_use_the_range_and_have_the_spread_that_is_said(epilogue: str) -> None:
    operands = Operands(asked(epilogue, 128, 640), SMALL, HOST, seed=1)
    first, second = operands.sets[:2]
    scaled = exact(operands) * drawn_with(first.scale_d).double()
    assert 20 < float(scaled.abs().max()) < 448
    (case,) = operands.cases
    assert float(scaled.square().mean().sqrt()) == pytest.approx(case.sigmas[0], rel=0.15)
    assert drawn_with(first.scale_d).data_ptr() == drawn_with(second.scale_d).data_ptr()
    assert drawn_with(first.amax).data_ptr() != drawn_with(second.amax).data_ptr()


def test_a_wrong_largest_value_is_caught() -> None:
    operands = Operands(asked("bias_gelu"), SMALL, HOST, seed=1)
    right = answer(operands, exact(operands))
    seen = drawn_with(operands.sets[0].amax)
    for factor in (0.0, 0.97, 1.03, float("nan")):
        kept = seen.clone()
        seen.mul_(factor)
        _, failure = judged(operands, right)
        seen.copy_(kept)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG
        assert "the largest value is" in failure.message
    operands.restart(operands.sets[0])
    assert float(seen) == 0.0


def test_what_is_wrong_or_never_written_is_caught() -> None:
    operands = Operands(asked("bias_silu"), SMALL, HOST, seed=1)
    right = answer(operands, exact(operands))
    for wrong, kind in (
        ((right.double() * 1.07).to(FP8), FailureKind.WRONG),
        (right.roll(1, 1), FailureKind.WRONG),
    ):
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is kind
    unwritten = right.clone()
    poison(unwritten[:, :1])
    _, failure = judged(operands, unwritten)
    assert failure is not None
    assert failure.kind is FailureKind.UNTOUCHED


@pytest.mark.parametrize("k", [4096, 16384])
def test_a_dropped_slice_is_caught_even_beside_fast_sums(k: int) -> None:
    """At Llama 3 405B's K. The drift of sums in the tensor core is allowed for."""
    problem = asked("bias_gelu", 64, 96, k)
    operands = Operands(problem, SMALL, HOST, seed=1)
    value, less = exact(operands), exact(operands, k - 128)
    scale = drawn_with(operands.sets[0].scale_d).double()
    found = (less * scale).to(FP8).double()
    error = float((found - value * scale).norm() / (value * scale).norm())
    assert error > tolerance(problem, fast_accumulation=True).error
    assert error > tolerance(problem, fast_accumulation=False).error


def test_arguments_say_where_everything_lies() -> None:
    for epilogue in ("bias_gelu", "silu_gate"):
        operands = Operands(asked(epilogue), SMALL, HOST, seed=1)
        first = operands.sets[0]
        filled = operands.arguments(first, operands.check)
        assert filled.scale_d == drawn_with(first.scale_d).data_ptr()
        assert filled.amax == drawn_with(first.amax).data_ptr()
        assert (filled.aux, filled.residual, filled.beta) == (None, None, 0.0)
        assert filled.d == operands.check.data_ptr()
        assert (filled.bias is None) is (epilogue == "silu_gate")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_torchs_ways_compute_the_operation(epilogue: str) -> None:
    problem = asked(epilogue)
    operands = Operands(problem, SMALL, HOST, seed=1)
    s, value, workload = operands.sets[0], exact(operands), workload_of(problem.operation)
    wanted = (value * drawn_with(s.scale_d).double())[0]
    name, _ = ways.first_that_runs(
        workload.defaults(problem), problem, operands.sets, operands.room
    )
    default = next(way for way in workload.defaults(problem) if way.name == name)
    assert name.startswith("torch._scaled_mm")
    assert name.endswith("then amax, mul, clamp and cast")
    for way in (default, *workload.alternatives(problem)):
        if "into FP8" in way.name:
            continue  # the host's ignores the result's factor
        operands.restart(s)
        s.d.view(torch.int8).zero_()
        found = way.launches(problem, operands.sets, operands.room)[0]()
        assert found.dtype is FP8
        error = (found.double() - wanted).norm() / wanted.norm()
        assert float(error) < 4e-2, way.name
        if way is default:
            assert found.data_ptr() == s.d.data_ptr()
            assert float(drawn_with(s.amax)) == pytest.approx(float(value.abs().max()), rel=1e-2)


def test_memory_of_a_set() -> None:
    narrow = footprint(asked("bias_gelu", 128, 256, 512))
    wide = footprint(Problem(m=128, n=256, k=512, dtype="fp8_e4m3.then_bias_gelu"))
    assert 2 * narrow.d == wide.d
    assert narrow.epilogue == wide.epilogue == 512
