"""Operands, reference and comparison, on the host: the arithmetic needs no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from gemmsmith.core.device import DeviceModel
from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import DType, Layout, Problem
from tests.support.candidates import KERNEL
from tests.support.replacing import replace
from tuner.errors import ReferenceBroken
from tuner.trial import FailureKind
from tuner.workloads import reference as checking
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.reference import Reference, tolerance

SMALL = DeviceModel(name="host", arch="sm90", sm_count=1, memory_bytes=16 * 2**30, l2_bytes=100_000)
PROBLEMS = [
    Problem(m=96, n=80, k=200, layout=layout, dtype=dtype)
    for layout in Layout
    for dtype in (DType.BF16, DType.FP16)
] + [
    Problem(m=96, n=80, k=256, dtype=DType.FP8_E4M3),
    Problem(m=33, n=17, k=65, dtype=DType.FP8_E5M2),
    Problem(m=13, n=7, k=129, batch=5),
    Problem(m=1, n=1, k=1),
]


def kernel(problem: Problem, *, fast: bool = False) -> AnyKernel:
    return replace(KERNEL, dtype=problem.dtype, layout=problem.layout, fast_accumulation=fast)


def right_answer(operands: Operands) -> torch.Tensor:
    first = operands.sets[0]
    exact = torch.bmm(first.a.double(), first.b.double())
    for scale in (first.scale_a, first.scale_b):
        exact *= 1.0 if scale is None else scale
    return exact.to(first.d.dtype)


def run(operands: Operands, answer: torch.Tensor) -> None:
    """What a kernel would have done, twice."""
    operands.sets[0].d.copy_(answer)
    operands.check.copy_(answer)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    reference = Reference(operands)
    run(operands, right_answer(operands))
    correctness, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is None
    assert correctness is not None
    assert correctness.error < (0.5 if problem.m > 1 else 0.9) * correctness.tolerance
    assert correctness.repeatable


@pytest.mark.parametrize("problem", PROBLEMS[:10], ids=str)
def test_output_has_unit_spread_and_sets_differ(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    assert 0.5 < right_answer(operands).float().std() / operands.sigma < 2
    assert 0.5 < operands.sigma < 2
    assert len(operands.sets) > 1
    first, second = operands.sets[:2]
    assert not torch.equal(first.a.float(), second.a.float())
    assert {s.a.data_ptr() % 256 for s in operands.sets} <= {operands.sets[0].a.data_ptr() % 256}


def test_another_seed_gives_other_operands() -> None:
    problem = PROBLEMS[0]
    one, again, other = (Operands(problem, SMALL, HOST, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.sets[0].b, again.sets[0].b)
    assert not torch.equal(one.sets[0].b, other.sets[0].b)


def test_fp8_operands_use_their_range_without_leaving_it() -> None:
    problem = Problem(m=256, n=256, k=256, dtype=DType.FP8_E5M2)
    operands = Operands(problem, SMALL, HOST, seed=1)
    for tensor, top in ((operands.sets[0].a, 57344.0), (operands.sets[0].b, 448.0)):
        values = tensor.float()
        assert values.isfinite().all()
        assert 0.4 * top < values.abs().max() <= top


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_a_dropped_slice_of_k_is_caught(dtype: DType) -> None:
    problem = Problem(m=64, n=64, k=8192, dtype=dtype)
    operands = Operands(problem, SMALL, HOST, seed=1)
    reference = Reference(operands)
    first = operands.sets[0]
    run(operands, torch.bmm(first.a[..., 64:].float(), first.b[:, 64:].float()).to(first.d.dtype))
    _, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_fp8_tolerance_still_catches_a_dropped_tile_at_real_sizes() -> None:
    for k in (1024, 4096, 8192, 16384, 28672):
        problem = Problem(m=64, n=64, k=k, dtype=DType.FP8_E4M3)
        assert tolerance(problem, fast_accumulation=True).error < math.sqrt(128 / k)
        assert tolerance(problem, fast_accumulation=False).error == 5e-3


def test_one_wrong_tile_among_many_is_caught_by_the_largest_error() -> None:
    problem = Problem(m=4096, n=2048, k=64)
    operands = Operands(problem, SMALL, HOST, seed=1)
    reference = Reference(operands)
    answer = right_answer(operands)
    answer[0, :1, :8] = answer[0, 64:65, :8]
    run(operands, answer)
    _, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_untouched_non_finite_and_unrepeatable_are_told_apart() -> None:
    problem = PROBLEMS[0]
    operands = Operands(problem, SMALL, HOST, seed=1)
    reference = Reference(operands)
    answer = right_answer(operands)

    poison(operands.sets[0].d)
    poison(operands.check)
    assert operands.sets[0].d.float().isnan().all()
    operands.sets[0].d[:, :95] = answer[:, :95]
    _, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is not None
    assert failure.kind is FailureKind.UNTOUCHED
    assert failure.message.startswith("80 of 7680")

    for bad in (math.nan, math.inf, -math.inf):
        run(operands, answer)
        operands.sets[0].d[0, 5, 5] = bad
        _, failure = reference.check(kernel(problem), claims_order=True)
        assert failure is not None
        assert failure.kind is FailureKind.NON_FINITE

    run(operands, answer)
    operands.check[0, 3, 3] = answer[0, 3, 3] * 1.01
    _, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is not None
    assert failure.kind is FailureKind.NOT_REPEATABLE
    correctness, failure = reference.check(kernel(problem), claims_order=False)
    assert failure is None
    assert correctness is not None
    assert not correctness.repeatable


def test_a_broken_reference_is_nobodys_fault() -> None:
    operands = Operands(PROBLEMS[0], SMALL, HOST, seed=1)
    operands.sets[0].a[0, 0, 0] = math.nan
    with pytest.raises(ReferenceBroken, match="suspect this GPU"):
        Reference(operands)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[-2], Problem(m=5, n=700, k=90)], ids=str)
def test_blocks_cover_the_output_once(
    problem: Problem, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "CHUNK_ELEMENTS", 5000)
    monkeypatch.setattr(checking, "KEPT_BYTES", 2**30 if kept else 0)
    operands = Operands(problem, SMALL, HOST, seed=1)
    touched = torch.zeros_like(operands.check, dtype=torch.int32)
    blocks = list(checking._blocks(problem, problem.m))
    assert len(blocks) > 1
    for block in blocks:
        block.of(touched).add_(1)
    assert (touched == 1).all()
    reference = Reference(operands)
    run(operands, right_answer(operands))
    correctness, failure = reference.check(kernel(problem), claims_order=True)
    assert failure is None
    assert correctness is not None
    assert correctness.error > 0
