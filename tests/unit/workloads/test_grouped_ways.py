"""Grouped products on the host: what the C ABI is given, torch's own calls, and memory."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.operation import Grouping, Operation, Scaling
from gemmsmith.core.problem import Problem
from gemmsmith.runtime.abi import SCALING_CODES
from tests.support.grouped import FP8, OPERATIONS, ROWS, SMALL, WIDE, exact, problem_of
from tests.support.replacing import replace
from tuner.workloads import ways
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.registry import WORKLOADS
from tuner.workloads.workload import OperandSet, Way, drawn_with

TOKENS = [(96, 5), (1, 4), (64, 1), (3, 32)]


def test_what_the_c_abi_is_given_by_rows() -> None:
    operands = Operands(problem_of(*FP8[0]), SMALL, HOST, seed=1)
    s = operands.sets[1]
    filled = operands.arguments(s)
    assert s.scale_a is not None
    assert s.scale_b is not None
    assert (filled.m, filled.n, filled.k, filled.batch) == (96, 32, 48, 5)
    assert (filled.a, filled.b) == (s.a.data_ptr(), s.b.data_ptr())
    assert filled.offsets == drawn_with(s.groups).offsets.data_ptr()
    assert (filled.lda, filled.ldb, filled.ldd) == (48, 48, 32)
    assert (filled.batch_stride_a, filled.batch_stride_c, filled.batch_stride_d) == (0, 0, 0)
    assert filled.batch_stride_b == 32 * 48
    assert (filled.scale_a, filled.scale_b) == (s.scale_a.data_ptr(), s.scale_b.data_ptr())
    assert (filled.batch_stride_scale_a, filled.batch_stride_scale_b) == (0, 32)
    assert s.scale_a.numel() == 96
    assert filled.scaling == SCALING_CODES[Scaling.ROW]
    given = Operands(problem_of(*ROWS[1]), SMALL, HOST, seed=1)
    assert given.arguments(given.sets[0]).ldb == 32


def test_what_the_c_abi_is_given_by_depth() -> None:
    operands = Operands(problem_of(*WIDE[1]), SMALL, HOST, seed=1)
    filled = operands.arguments(operands.sets[0], operands.check)
    assert (filled.m, filled.n, filled.k, filled.batch) == (48, 32, 96, 5)
    assert (filled.lda, filled.ldb, filled.ldd) == (48, 32, 32)
    assert (filled.batch_stride_a, filled.batch_stride_b) == (0, 0)
    assert filled.batch_stride_c == filled.batch_stride_d == 48 * 32
    assert filled.c == filled.d == operands.check.data_ptr()
    assert filled.beta == 1.0
    operands = Operands(problem_of(*FP8[1]), SMALL, HOST, seed=1)
    filled = operands.arguments(operands.sets[0])
    assert (filled.lda, filled.ldb) == (96, 96)
    assert (filled.batch_stride_scale_a, filled.batch_stride_scale_b) == (48, 32)


@pytest.mark.parametrize(
    ("dtype", "layout", "extents", "names"),
    [
        ("bf16.group_rows", "tn", (8, 16, 16), ["torch._grouped_mm", "loop of torch.mm"]),
        ("bf16.group_rows", "tn", (8, 16, 12), ["loop of torch.mm"]),
        ("bf16.group_rows", "tt", (8, 12, 16), ["loop of torch.mm"]),
        ("fp16.group_depth", "nt", (16, 16, 9), ["torch._grouped_mm", "loop of torch.mm"]),
        ("fp16.group_depth", "nt", (12, 16, 9), ["loop of torch.mm"]),
        (
            "bf16.out_f32.group_depth",
            "nt",
            (16, 16, 9),
            ["torch._grouped_mm, then float", "loop of torch.mm with out_dtype"],
        ),
        (
            "bf16.out_f32.group_depth.accumulate",
            "nt",
            (16, 16, 9),
            ["torch._grouped_mm, then add_", "loop of torch.addmm with out_dtype"],
        ),
        ("fp8_e4m3.scale_row.group_rows", "tn", (9, 16, 16), ["torch._scaled_grouped_mm"]),
        ("fp8_e4m3.scale_row.group_rows", "tn", (9, 8, 16), ["loop of torch.mm on bf16 copies"]),
        ("fp8_e4m3.scale_row.group_depth", "tn", (8, 16, 24), ["loop of torch.mm on bf16 copies"]),
    ],
)
def test_the_first_ways_that_take_the_extents(
    dtype: str, layout: str, extents: tuple[int, int, int], names: list[str]
) -> None:
    problem = Problem.of(Operation.of(dtype, layout), *extents, batch=3)
    operands = Operands(problem, SMALL, HOST, seed=1)
    defaults = operands.workload.defaults(problem)
    assert [way.name for way in defaults if way.takes(problem)][: len(names)] == names
    assert defaults[-1].takes(problem)


@pytest.mark.parametrize(("tokens", "groups"), TOKENS)
@pytest.mark.parametrize(("dtype", "layout"), OPERATIONS)
def test_torchs_calls_compute_the_operation(
    dtype: str, layout: str, tokens: int, groups: int
) -> None:
    problem = problem_of(dtype, layout, tokens, groups)
    operands = Operands(problem, SMALL, HOST, seed=1)
    workload = operands.workload
    for way in (*workload.defaults(problem), *workload.alternatives(problem)):
        if "out_dtype" in way.name or "scaled_grouped" in way.name or not way.takes(problem):
            continue  # not for torch's CPU kernels
        for s in (case.operands for case in operands.cases):
            _compare(way, operands, s)


def _compare(way: Way, operands: Operands, s: OperandSet) -> None:
    operands.ready(s.d)
    plain = replace(s, scale_a=None, scale_b=None) if "copies" in way.name else s
    wanted = exact(operands.problem, plain, s.d)
    result = way.launches(operands.problem, [s], operands.room)[0]()
    written = slice(None)
    if operands.problem.operation.grouping is Grouping.ROWS:
        written = slice(0, drawn_with(s.groups).ends[-1])
    result, wanted = result.reshape(wanted.shape)[:, written].double(), wanted[:, written]
    difference = torch.linalg.vector_norm(result - wanted)
    assert difference <= 5e-3 * torch.linalg.vector_norm(wanted), way.name


def test_the_first_that_runs_covers_every_set() -> None:
    for dtype, layout in (*ROWS[:1], *WIDE):
        problem = problem_of(dtype, layout)
        operands = Operands(problem, SMALL, HOST, seed=1)
        name, launches = ways.first_that_runs(
            operands.workload.defaults(problem), problem, operands.sets, operands.room
        )
        assert name.startswith("torch._grouped_mm")
        assert len(launches) == len(operands.sets)
    loop = operands.workload.defaults(problem)[-1]
    assert "copies" in loop.name
    assert len(loop.launches(problem, operands.sets, 1)) == len(operands.sets)


def test_where_torch_would_wait_for_the_device_the_loop_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operands = Operands(problem_of(*ROWS[0]), SMALL, HOST, seed=1)

    def waits(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch, "_grouped_mm", waits)
    problem = operands.problem
    name, launches = ways.first_that_runs(
        operands.workload.defaults(problem), problem, operands.sets, operands.room
    )
    assert name == "loop of torch.mm"
    assert launches[0]() is operands.sets[0].d


def test_loops_are_timed_in_the_finals() -> None:
    for dtype, layout in OPERATIONS:
        problem = problem_of(dtype, layout)
        (workload,) = [w for w in WORKLOADS if w.covers(problem.operation)]
        rivals = [way.name for way in workload.alternatives(problem) if way.rival]
        scaled = problem.operation.is_scaled and problem.operation.grouping is Grouping.ROWS
        assert len(rivals) == (0 if scaled else 1), "cuBLAS refuses most numbers of FP8 rows"
        assert all(name.startswith("loop of") for name in rivals)


def test_what_they_take_in_memory() -> None:
    def parts(dtype: str, layout: str) -> tuple[int, ...]:
        memory = footprint(problem_of(dtype, layout, 1024, 8))
        return memory.a, memory.b, memory.d, memory.factors, memory.default

    m, n, k, tokens, groups = 48, 32, 48, 1024, 8
    weights = groups * n * k
    assert parts("bf16.group_rows", "tn") == (
        2 * tokens * k,
        2 * weights,
        2 * tokens * n,
        0,
        2 * tokens * n,
    )
    assert parts("bf16.out_f32.group_depth", "nt") == (
        2 * tokens * m,
        2 * tokens * n,
        4 * weights,
        0,
        2 * weights,
    )
    assert parts(*FP8[0])[3] == 4 * (tokens + groups * n)
    assert parts(*FP8[1])[3] == 4 * groups * (m + n)
