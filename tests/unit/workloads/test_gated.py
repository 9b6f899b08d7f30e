"""Gated products: operands, references of every output, tolerance, torch's ways, on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from gemmsmith.core.operation import Epilogue
from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged
from tests.support.replacing import replace
from tuner.trial import FailureKind
from tuner.workloads import fused_ways, reference, ways
from tuner.workloads.operands import HOST, Operands, poison
from tuner.workloads.reference import tolerance
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block, Way

GATED = [epilogue for epilogue in Epilogue if epilogue.is_gated]
PROBLEMS = [
    *(Problem(m=96, n=160, k=208, dtype=f"bf16.then_{epilogue}") for epilogue in GATED),
    *(Problem(m=33, n=48, k=40, dtype=f"fp16.then_{epilogue}") for epilogue in GATED),
    Problem(m=96, n=160, k=208, dtype="fp8_e4m3.then_silu_gate_aux"),
    Problem(m=1, n=16, k=8, dtype="bf16.then_silu_gate"),
]


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_ways, "COMPILER", "eager")
    yield
    torch._dynamo.reset()


def right_answer(operands: Operands) -> torch.Tensor:
    """By FP64 and torch's functions, as it lies in memory: D, and each row of aux as two."""
    s, problem = operands.sets[0], operands.problem
    both = s.a[0].double() @ s.b[0].double()
    for factor in (s.scale_a, s.scale_b):
        both = both if factor is None else both * factor.double().item()
    gate, up = both.chunk(2, -1)
    activated = {
        "gelu_tanh": functional.gelu(gate, approximate="tanh"),
        "gelu": functional.gelu(gate),
        "silu": gate / (1 + torch.exp(-gate)),
    }[problem.operation.epilogue.activation or ""]
    d = (activated * up).view(1, problem.m, -1)
    if not problem.operation.epilogue.stores_aux:
        return d.to(s.d.dtype)
    return torch.cat([d, both.view(2, problem.m, -1)]).to(s.d.dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.6 if problem.m > 1 else 0.9)


def test_the_reference_may_be_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any rows and columns, and of an odd number of aux's rows of I."""
    problem = Problem(m=33, n=48, k=40, dtype="fp16.then_silu_gate_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    right = right_answer(operands).float()
    everything = Block(batches=slice(0, 3), rows=slice(0, 33), columns=slice(0, 24))
    whole = operands.workload.product(problem, operands.sets[0], everything)
    torch.testing.assert_close(whole, right, rtol=1e-2, atol=1e-2)
    for rows in (slice(0, 7), slice(7, 14), slice(14, 33), slice(5, 6)):
        block = Block(batches=slice(1, 3), rows=rows, columns=slice(3, 11))
        part = operands.workload.product(problem, operands.sets[0], block)
        torch.testing.assert_close(part, block.of(whole))
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 300)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < 0.6


@pytest.mark.parametrize("epilogue", GATED)
def test_outputs_have_the_spread_that_is_said(epilogue: Epilogue) -> None:
    problem = Problem(m=64, n=640, k=200, dtype=f"bf16.then_{epilogue}")
    operands = Operands(problem, SMALL, HOST, seed=1)
    deviation = right_answer(operands).double().square().mean((1, 2)).sqrt()
    (case,) = operands.cases
    assert len(deviation) == len(case.sigmas) == (3 if epilogue.stores_aux else 1)
    for measured, said in zip(deviation.tolist(), case.sigmas, strict=True):
        assert measured == pytest.approx(said, rel=0.15)


def test_each_output_is_judged_by_itself() -> None:
    problem = Problem(m=96, n=160, k=208, dtype="bf16.then_silu_gate_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    answer = right_answer(operands)
    for output in range(3):
        wrong = answer.clone()
        wrong[output] *= 1.02
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG
        poison(wrong[output, :1])
        _, failure = judged(operands, wrong)
        assert failure is not None
        assert failure.kind is FailureKind.UNTOUCHED


@pytest.mark.parametrize("mistake", ["swapped", "neighbours", "not gated"])
def test_what_is_confused_is_caught(mistake: str) -> None:
    problem = Problem(m=96, n=160, k=208, dtype="bf16.then_silu_gate")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    kept = first.b.clone()
    half = problem.columns
    if mistake == "swapped":
        first.b.copy_(torch.cat([kept[:, :, half:], kept[:, :, :half]], -1))
    elif mistake == "neighbours":
        first.b.copy_(torch.cat([kept[:, :, 0::2], kept[:, :, 1::2]], -1))
    else:
        first.b[:, :, :half] = 0
    answer = right_answer(operands)
    first.b.copy_(kept)
    _, failure = judged(operands, answer)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_the_abi_gets_both_halves_and_what_is_stored() -> None:
    problem = Problem(m=33, n=48, k=40, dtype="bf16.then_gelu_gate_aux")
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    arguments = operands.arguments(first)
    assert arguments.b_up == arguments.b + 24 * 40 * 2
    assert arguments.aux == arguments.d + 33 * 24 * 2
    assert (arguments.n, arguments.ldb, arguments.ldd, arguments.ld_aux) == (48, 40, 24, 48)
    plain = Operands(replace(problem, dtype="bf16"), SMALL, HOST, seed=1)
    assert plain.arguments(plain.sets[0]).b_up is None


@pytest.mark.parametrize("problem", PROBLEMS[:-2], ids=str)
def test_every_way_of_torchs_computes_it(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    workload = workload_of(problem.operation)
    right = right_answer(operands).double()
    default = workload.defaults(problem)[0]
    for way in (default, *workload.alternatives(problem)):
        first = operands.sets[0]
        first.d.zero_()
        found = way.launches(problem, operands.sets, operands.room)[0]().double()
        assert found.shape == (problem.m, problem.columns)
        error = torch.linalg.vector_norm(found - right[0]) / torch.linalg.vector_norm(right[0])
        assert error < 2e-2, way.name
        if way is default:
            torch.testing.assert_close(first.d[1:].double(), right[1:], rtol=2e-2, atol=2e-2)


def test_compiled_ways_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rivals are made before the first is timed."""
    compilations: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compilations.append(str(graph))
        return graph

    monkeypatch.setattr(fused_ways, "COMPILER", backend)
    for problem in (PROBLEMS[0], replace(PROBLEMS[0], m=64)):
        compilations.clear()
        operands = Operands(problem, SMALL, HOST, seed=1)
        ways_of = workload_of(problem.operation).alternatives(problem)
        made = []
        for way in ways_of:
            made.append(way.launches(problem, operands.sets[:2], operands.room))
            made[-1][0]()
        for launches in made:
            for launch in launches:
                launch()
        assert len(compilations) == 2


def test_names_say_the_calls() -> None:
    def names(dtype: str) -> list[str]:
        problem = Problem(m=96, n=160, k=208, dtype=dtype)
        workload = workload_of(problem.operation)
        found: list[Way] = [*workload.defaults(problem), *workload.alternatives(problem)]
        assert all(way.is_to_be_beaten for way in workload.alternatives(problem))
        return [way.name for way in found]

    assert names("bf16.then_silu_gate") == [
        "torch.mm, then silu and mul",
        "torch.compile of the same",
        "torch.mm twice, then silu and mul",
        "torch.compile of two products",
    ]
    assert names("fp8_e4m3.then_gelu_gate_aux") == [
        "torch._scaled_mm, then gelu and mul",
        "torch.mm on bf16 copies, then gelu and mul",
        "torch.compile of the same",
    ]


def test_fp8_on_copies_runs_where_cublas_refuses() -> None:
    problem = Problem(m=33, n=40, k=24, dtype="fp8_e4m3.then_silu_gate")
    operands = Operands(problem, SMALL, HOST, seed=1)
    workload = workload_of(problem.operation)
    name, _ = ways.first_that_runs(
        workload.defaults(problem), problem, operands.sets, operands.room
    )
    assert name == "torch.mm on bf16 copies, then silu and mul"
    assert not workload.alternatives(problem)


def test_sums_that_stay_in_the_tensor_core_may_drift_twice() -> None:
    gated = Problem(m=96, n=160, k=4096, dtype="fp8_e4m3.then_silu_gate")
    plain = replace(gated, dtype="fp8_e4m3")
    for fast in (False, True):
        mine, bare = (tolerance(one, fast_accumulation=fast) for one in (gated, plain))
        assert (mine.error > bare.error) is fast
