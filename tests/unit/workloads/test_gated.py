"""Gated products on the host: blocks, mistakes, arguments. See also `test_epilogues`."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.problem import Problem
from tests.support.judging import SMALL, judged, right_answer
from tests.support.replacing import replace
from tuner.trial import FailureKind
from tuner.workloads import reference, ways
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.reference import tolerance
from tuner.workloads.registry import workload_of
from tuner.workloads.workload import Block


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


@pytest.mark.usefixtures("uncompiled")
def test_compiled_ways_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rivals are made before the first is timed."""
    compilations: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compilations.append(str(graph))
        return graph

    monkeypatch.setattr(ways, "COMPILER", backend)
    for m in (96, 64):
        problem = Problem(m=m, n=160, k=208, dtype="bf16.then_silu_gate")
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
