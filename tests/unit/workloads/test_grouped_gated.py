"""Grouped products with a gate, forward and backward: operands, references of every output, torch's
ways, on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from tests.support.candidates import KERNEL
from tests.support.judging import ACTIVATIONS, SMALL
from tests.support.replacing import replace
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.reference import Reference, tolerance
from tuner.workloads.registry import workload_of
from tuner.workloads.spreads import Spread
from tuner.workloads.workload import OperandSet, Way, drawn_with

PROBLEMS = [
    *(
        Problem(m=96, n=48, k=40, batch=5, dtype=f"bf16.group_rows.then_{name}_gate{aux}")
        for name in ("silu", "gelu_tanh", "gelu")
        for aux in ("", "_aux")
    ),
    Problem(m=33, n=32, k=24, batch=4, dtype="fp16.group_rows.then_silu_gate_aux"),
    Problem(m=3, n=16, k=8, batch=32, dtype="bf16.group_rows.then_silu_gate"),
]
BACKWARD = [
    *(
        Problem(
            m=96, n=72, k=40, batch=5, dtype=f"bf16.group_rows.then_d{name}_gate{act}", layout=y
        )
        for name in ("silu", "gelu_tanh", "gelu", "relu", "sigmoid")
        for act, y in (("", "tn"), ("_act", "tt"))
    ),
    Problem(m=33, n=136, k=24, batch=4, dtype="fp16.group_rows.then_dsilu_gate_act"),
    Problem(m=3, n=16, k=8, batch=32, dtype="bf16.group_rows.then_dsilu_gate"),
]
EVERY = pytest.mark.parametrize("problem", [*PROBLEMS, *BACKWARD], ids=str)


def right_answer(problem: Problem, s: OperandSet) -> torch.Tensor:
    """By FP64 and torch's functions, group by group: D, and gate and up where stored.

    Backward the gradients of gate and up, and the activation's value where it is an output. The
    gradients of the factors are written to the set.
    """
    both = torch.zeros(problem.m, problem.n, dtype=torch.float64)
    for group, run in enumerate(drawn_with(s.groups).runs):
        both[run] = s.a[0, run].double() @ s.b[group].double()
    parts = problem.operation.epilogue.backward
    if parts is not None:
        aux = drawn_with(s.aux)[0].double().requires_grad_()
        shares = drawn_with(s.row_scale)[0].double().requires_grad_()
        value = ACTIVATIONS[parts.activation](aux[:, : problem.n]) * aux[:, problem.n :] * shares
        of_aux, of_shares = torch.autograd.grad(value, (aux, shares), both)
        drawn_with(s.row_gradient)[: drawn_with(s.groups).ends[-1]] = 0
        drawn_with(s.row_gradient)[: drawn_with(s.groups).ends[-1], 0] = of_shares[
            : drawn_with(s.groups).ends[-1], 0
        ].float()
        return torch.stack([*of_aux.chunk(2, -1), value.detach()][: len(s.d)])
    gate, up = both.chunk(2, -1)
    activation = str(problem.operation.epilogue.activation)
    d = ACTIVATIONS[activation](gate) * up * drawn_with(s.row_scale)[0].double()
    outputs = [d, gate, up] if problem.operation.epilogue.stores_aux else [d]
    return torch.stack(outputs)


def judged(
    operands: Operands, change: Callable[[torch.Tensor, OperandSet], None] = lambda *_: None
) -> Failure | None:
    """What is found where every case is computed exactly, then changed."""
    problem = operands.problem

    def launch(i: int) -> None:
        case = operands.cases[i]
        s, written = case.operands, slice(0, case.written)
        operands.restart(s)
        operands.ready(s.d)
        s.d[:, written] = right_answer(problem, s)[:, written].to(s.d.dtype)
        change(s.d, s)
        operands.check.copy_(s.d)

    kernel: AnyKernel = replace(KERNEL, dtype=problem.dtype, layout=problem.layout)
    found, failure = Reference(operands).check(kernel, claims_order=True, launch=launch)
    assert failure is not None or (found is not None and found.error < 0.9 * found.tolerance)
    return failure


@EVERY
def test_the_right_answer_passes(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    assert [case.name for case in operands.cases] == [*Spread, "short"]
    assert judged(operands) is None


@EVERY
def test_the_spread_that_is_expected_is_drawn(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=2)
    case = operands.cases[0]
    for sigma, matrix in zip(case.sigmas, right_answer(problem, case.operands), strict=True):
        if matrix.numel() > 1000:
            assert float(matrix.square().mean().sqrt()) == pytest.approx(sigma, rel=0.25)


def _without_factor(d: torch.Tensor, s: OperandSet) -> None:
    d[0] /= drawn_with(s.row_scale)[0].to(d.dtype)


def _halves_exchanged(d: torch.Tensor, _: OperandSet) -> None:
    d[1:] = d[1:].flip(0).clone()


def _sums_of_a_slab_left_out(_: torch.Tensor, s: OperandSet) -> None:
    drawn_with(s.row_gradient)[: drawn_with(s.groups).ends[-1]] *= 0.95


def _sums_beyond_the_groups(_: torch.Tensor, s: OperandSet) -> None:
    drawn_with(s.row_gradient).nan_to_num_(0.0)


def _sums_not_written(_: torch.Tensor, s: OperandSet) -> None:
    drawn_with(s.row_gradient)[0, 0] = torch.nan


def _value_without_factor(d: torch.Tensor, s: OperandSet) -> None:
    d[2] /= drawn_with(s.row_scale)[0].to(d.dtype)


def _up_rounded_to_zero(d: torch.Tensor, _: OperandSet) -> None:
    d[2, 0] = 0


@pytest.mark.parametrize("change", [_without_factor, _halves_exchanged, _up_rounded_to_zero])
def test_a_mistake_in_any_output_is_found(change: Callable[..., None]) -> None:
    failure = judged(Operands(PROBLEMS[1], SMALL, HOST, seed=1), change)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize(
    "change",
    [
        _without_factor,
        _halves_exchanged,
        _value_without_factor,
        _sums_of_a_slab_left_out,
        _sums_beyond_the_groups,
        _sums_not_written,
    ],
)
def test_a_mistake_in_any_gradient_is_found(change: Callable[..., None]) -> None:
    failure = judged(Operands(BACKWARD[1], SMALL, HOST, seed=1), change)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize("problem", [PROBLEMS[1], BACKWARD[1]], ids=str)
@pytest.mark.parametrize("matrix", [0, 1, 2])
def test_no_row_after_the_last_group_is_written(matrix: int, problem: Problem) -> None:
    def change(d: torch.Tensor, s: OperandSet) -> None:
        if drawn_with(s.groups).ends[-1] < d.shape[1]:
            d[matrix, -1, 0] = 0

    failure = judged(Operands(problem, SMALL, HOST, seed=1), change)
    assert failure is not None
    assert "after the last group" in failure.message


def test_a_kernel_is_told_where_everything_lies() -> None:
    problem = PROBLEMS[1]
    operands = Operands(problem, SMALL, HOST, seed=1)
    s, half = operands.sets[0], problem.n // 2
    given = operands.arguments(s)
    assert given.b_up == given.b + half * problem.k * 2
    assert given.row_scale == drawn_with(s.row_scale).data_ptr()
    assert (given.ldd, given.ld_aux) == (3 * half, 3 * half)
    assert given.aux == given.d + 2 * half
    assert given.offsets == drawn_with(s.groups).offsets.data_ptr()
    plain = Operands(PROBLEMS[0], SMALL, HOST, seed=1)
    given = plain.arguments(plain.sets[0])
    assert (given.ldd, given.aux) == (half, None)


def test_a_backward_kernel_is_told_where_everything_lies() -> None:
    problem = BACKWARD[1]
    operands = Operands(problem, SMALL, HOST, seed=1)
    s, n = operands.sets[0], problem.n
    given = operands.arguments(s)
    assert (given.ldd, given.ld_aux, given.ld_activated) == (3 * n, 2 * n, 3 * n)
    assert given.activated == given.d + 4 * n
    assert given.aux == drawn_with(s.aux).data_ptr()
    assert given.row_scale == drawn_with(s.row_scale).data_ptr()
    assert given.row_gradient == drawn_with(s.row_gradient).data_ptr()
    assert drawn_with(s.row_gradient).shape == (problem.m, 2)


def _ways(problem: Problem) -> list[Way]:
    workload = workload_of(problem.operation)
    return [*workload.defaults(problem), *workload.alternatives(problem)]


@pytest.mark.usefixtures("uncompiled")
@EVERY
def test_every_way_computes_the_same(problem: Problem) -> None:
    """But for what torch rounds between its steps."""
    operands = Operands(problem, SMALL, HOST, seed=3)
    bound = 4 * tolerance(problem, fast_accumulation=False).error
    for way in _ways(problem):
        if not way.takes(problem):
            continue
        s = operands.sets[0]
        found = way.launches(problem, [s], 1 << 30)[0]()
        wanted = right_answer(problem, s)[0]
        assert found.shape == wanted.shape
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < bound, way.name


def test_what_is_to_be_beaten() -> None:
    names = [way.name for way in _ways(PROBLEMS[0]) if way.is_to_be_beaten]
    assert names[0] == "torch.compile of the same"
    assert names[1].endswith("then one pass of gemmsmith.experts")
    assert [way.is_to_be_beaten for way in _ways(BACKWARD[0])] == [
        way.is_to_be_beaten for way in _ways(PROBLEMS[0])
    ]
    assert not any(way.is_to_be_beaten for way in _ways(PROBLEMS[-2]))
