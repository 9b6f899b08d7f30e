"""Each family's operands, exact product, tolerance and torch's own calls, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from gemmsmith.core.operation import DType, Operation, Scaling, layouts_of
from gemmsmith.core.problem import Layout, Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.runtime.abi import SCALING_CODES
from tests.support.judging import SMALL, judged
from tuner.trial import FailureKind
from tuner.workloads import ways
from tuner.workloads.footprint import footprint
from tuner.workloads.operands import HOST, Operands, bits, poison, untouched
from tuner.workloads.reference import tolerance
from tuner.workloads.registry import WORKLOADS, workload_of
from tuner.workloads.workload import OperandSet, Way

ROWS = ("fp8_e4m3.scale_row", "fp8_e5m2.scale_row")
INT8 = ("int8", "int8.out_bf16", "int8.out_bf16.scale_row")
WIDE = ("bf16.out_f32", "fp16.out_f32")
ADDED = ("bf16.out_f32.accumulate", "fp16.out_f32.accumulate")
NEW = (*INT8, *WIDE, *ADDED, "tf32", *ROWS)
EXTENTS = [(96, 80, 200, 1), (33, 17, 65, 1), (13, 24, 40, 3), (1, 1, 1, 1)]
PROBLEMS = [
    Problem(m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
    for dtype, (m, n, k, batch) in itertools.product(NEW, EXTENTS)
    for layout in (layouts_of(dtype) if m == 96 else (Layout.TN,))
]


def right_answer(operands: Operands) -> torch.Tensor:
    """By whole numbers or FP64, from what the C ABI would be given and nothing else."""
    first, problem = operands.sets[0], operands.problem
    arguments = operands.arguments(first)
    if problem.operation.a.is_integer:
        product = torch.bmm(first.a.long(), first.b.long()).double()
    else:
        product = torch.bmm(first.a.double(), first.b.double())
    product *= arguments.alpha
    for scale in (first.scale_a, first.scale_b):
        product *= 1.0 if scale is None else scale.double()
    operands.ready(operands.check)
    if arguments.beta:
        product += operands.check.double() * arguments.beta
    return product.to(first.d.dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_right_answer_passes_well_inside_the_tolerance(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands, right_answer(operands))
    assert failure is None
    assert share < (0.5 if problem.m > 1 else 0.9)


@pytest.mark.parametrize("dtype", NEW)
def test_output_has_the_spread_that_is_said_and_sets_differ(dtype: str) -> None:
    operands = Operands(Problem(m=96, n=80, k=200, dtype=dtype), SMALL, HOST, seed=1)
    assert 0.8 < right_answer(operands).double().std() / operands.sigma < 1.25
    if not operands.problem.operation.d.is_integer:
        assert 0.5 < operands.sigma < 2
    first, second = operands.sets[:2]
    assert not torch.equal(first.a, second.a)
    again = Operands(operands.problem, SMALL, HOST, seed=1)
    assert torch.equal(first.b, again.sets[0].b)


def test_int8_uses_its_range_symmetrically() -> None:
    operands = Operands(Problem(m=512, n=64, k=512, dtype="int8"), SMALL, HOST, seed=1)
    a = operands.sets[0].a.long()
    assert a.min() == -127
    assert a.max() == 127
    assert a.double().std() == pytest.approx(32.0, rel=0.01)
    assert abs(a.double().mean()) < 0.3


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_default_computes_the_operation(problem: Problem) -> None:
    operands = Operands(problem, SMALL, HOST, seed=1)
    wanted = right_answer(operands)
    workload = operands.workload
    name, _ = ways.first_that_runs(
        workload.defaults(problem), problem, operands.sets, operands.room
    )
    operands.ready(operands.sets[0].d)
    way = next(way for way in workload.defaults(problem) if way.name == name)
    result = way.launches(problem, operands.sets, operands.room)[0]()
    share, failure = judged(operands, result.reshape(wanted.shape))
    assert failure is None, (name, failure)
    assert share < 1.0


@pytest.mark.parametrize("dtype", [*NEW, *DType])
def test_alternatives_compute_the_operation_too(dtype: str) -> None:
    problem = Problem(m=32, n=48, k=64, dtype=dtype)
    operands = Operands(problem, SMALL, HOST, seed=1)
    wanted = right_answer(operands).double()
    for way in operands.workload.alternatives(problem):
        if "out_dtype" in way.name or "fast accumulation" in way.name:
            continue  # not for torch's CPU kernels
        operands.ready(operands.sets[0].d)
        result = way.launches(problem, operands.sets, operands.room)[0]().double()
        if "bf16 copies" in way.name:  # the user multiplies by the factors at some other place
            result *= ways_factor(operands.sets[0])
        error = torch.linalg.vector_norm(result - wanted) / torch.linalg.vector_norm(wanted)
        assert error < 1e-2, way.name


def ways_factor(operands: OperandSet) -> torch.Tensor:
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    return operands.scale_a * operands.scale_b


@pytest.mark.parametrize(
    ("dtype", "extents", "name"),
    [
        ("bf16", (32, 16, 16, 1), "torch.mm"),
        ("fp16", (32, 16, 16, 2), "torch.bmm"),
        ("bf16.out_f32", (32, 16, 16, 1), "torch.mm with out_dtype"),
        ("bf16.out_f32.accumulate", (32, 16, 16, 1), "torch.addmm with out_dtype"),
        ("bf16.out_f32.accumulate", (32, 16, 16, 2), "torch.baddbmm with out_dtype"),
        ("tf32", (32, 16, 16, 1), "torch.mm with allow_tf32"),
        ("fp8_e4m3", (32, 16, 16, 1), "torch._scaled_mm"),
        ("fp8_e4m3", (32, 17, 16, 1), "torch.mm on bf16 copies"),
        ("fp8_e5m2", (32, 16, 24, 1), "torch.mm on bf16 copies"),
        ("fp8_e4m3.scale_row", (1, 16, 16, 2), "torch._scaled_mm"),
        ("fp8_e4m3.scale_row", (32, 24, 16, 1), "torch.mm on bf16 operands"),
        ("fp8_e5m2.scale_row", (32, 16, 24, 2), "torch.mm on bf16 operands"),
        ("int8", (17, 8, 8, 1), "torch._int_mm"),
        ("int8", (16, 8, 8, 1), "torch._int_mm on padded operands"),
        ("int8", (32, 12, 8, 1), "torch._int_mm on padded operands"),
        ("int8", (32, 8, 12, 1), "torch._int_mm on padded operands"),
        ("int8.out_bf16", (32, 8, 8, 1), "torch._int_mm, then alpha"),
        ("int8.out_bf16.scale_row", (32, 8, 8, 1), "torch._int_mm, then both scales"),
        (
            "int8.out_bf16.scale_row",
            (1, 8, 8, 1),
            "torch._int_mm on padded operands, then both scales",
        ),
    ],
)
def test_the_first_way_that_takes_the_extents(
    dtype: str, extents: tuple[int, int, int, int], name: str
) -> None:
    m, n, k, batch = extents
    problem = Problem(m=m, n=n, k=k, batch=batch, dtype=dtype)
    defaults = workload_of(problem.operation).defaults(problem)
    assert next(way.name for way in defaults if way.takes(problem)) == name
    assert defaults[-1].takes(problem)


def test_a_way_that_torch_refuses_falls_to_the_next_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem = Problem(m=4, n=4, k=4)
    operands = Operands(problem, SMALL, HOST, seed=1)

    def way(name: str, error: Exception | None) -> Way:
        def launch() -> torch.Tensor:
            if error is not None:
                raise error
            return operands.sets[0].d

        return Way(name=name, launches=lambda *_: [launch])

    refused = way("newer", TypeError("unexpected keyword argument"))
    other_gpu = way("another GPU's", ValueError("only supported on CUDA devices with …"))
    found, _ = ways.first_that_runs(
        [refused, other_gpu, way("older", None)], problem, operands.sets, operands.room
    )
    assert found == "older"
    assert "torch refuses newer for 4×4×4 bf16 tn: unexpected keyword argument" in caplog.text
    for error in (torch.OutOfMemoryError("no room"), torch.AcceleratorError("dead")):
        with pytest.raises(type(error)):
            ways.first_that_runs(
                [way("first", error), way("older", None)], problem, operands.sets, operands.room
            )
    with pytest.raises(RuntimeError, match="nothing left"):
        ways.first_that_runs(
            [refused, way("last", RuntimeError("nothing left"))], problem, operands.sets, 1
        )


@pytest.mark.parametrize("dtype", ADDED)
def test_what_adds_is_judged_by_what_was_there(dtype: str) -> None:
    problem = Problem(m=64, n=48, k=96, dtype=dtype, layout=Layout.NT)
    operands = Operands(problem, SMALL, HOST, seed=1)
    start = torch.empty_like(operands.check)
    operands.ready(start)
    added = right_answer(operands)
    product = (added.double() - start.double()).float()
    wrong: list[torch.Tensor] = [product, start, start + 2 * product]
    partly = added.clone()
    partly[0, 7, :4] = start[0, 7, :4]
    for answer in (*wrong, partly):
        _, failure = judged(operands, answer)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG


def test_what_adds_stays_finite_for_hours_of_launches() -> None:
    problem = Problem(m=64, n=48, k=96, dtype="bf16.out_f32.accumulate", layout=Layout.NT)
    operands = Operands(problem, SMALL, HOST, seed=1)
    operands.ready(operands.check)
    once = (right_answer(operands).double() - operands.check.double()).abs().max()
    launches_of_an_hour = 3.6e9
    assert once * launches_of_an_hour < 1e-20 * torch.finfo(torch.float32).max
    assert all(s.d.isfinite().all() for s in operands.sets)
    assert not torch.equal(operands.sets[0].d, operands.sets[1].d)


@pytest.mark.parametrize("step", [1, -1, 2**20])
def test_integers_must_be_equal(step: int) -> None:
    operands = Operands(Problem(m=96, n=80, k=200, dtype="int8"), SMALL, HOST, seed=1)
    answer = right_answer(operands)
    answer[0, 95, 79] += step
    _, failure = judged(operands, answer)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    assert tolerance(operands.problem, fast_accumulation=False).error == 0


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a, b: (a.roll(1, 1), b),
        lambda a, b: (a, b.roll(1, 2)),
        lambda a, b: (a[:, :1], b),
        lambda a, b: (a, b[..., :1]),
    ],
    ids=["shifted a", "shifted b", "one factor for a", "one factor for b"],
)
@pytest.mark.parametrize("dtype", ["int8.out_bf16.scale_row", *ROWS])
def test_a_factor_at_the_wrong_place_is_caught(
    mistake: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], dtype: str
) -> None:
    problem = Problem(m=64, n=48, k=96, dtype=dtype)
    operands = Operands(problem, SMALL, HOST, seed=1)
    first = operands.sets[0]
    assert first.scale_a is not None
    assert first.scale_b is not None
    scale_a, scale_b = mistake(first.scale_a, first.scale_b)
    product = torch.bmm(first.a.double(), first.b.double()) * scale_a * scale_b
    _, failure = judged(operands, product.bfloat16())
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize("dtype", [*WIDE, *ADDED])
@pytest.mark.parametrize("k", [64, 8192])
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16])
def test_sums_that_were_rounded_on_the_way_are_caught(
    dtype: str, k: int, rounded: torch.dtype
) -> None:
    operands = Operands(Problem(m=64, n=48, k=k, dtype=dtype), SMALL, HOST, seed=1)
    _, failure = judged(operands, right_answer(operands).to(rounded).float())
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize("k", [1, 2, 64, 4096])
def test_tf32_passes_and_bf16_does_not(k: int) -> None:
    problem = Problem(m=96, n=80, k=k, dtype="tf32")
    operands = Operands(problem, SMALL, HOST, seed=1)
    a, b = operands.sets[0].a, operands.sets[0].b
    cut = torch.bmm(*((x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)))
    share, failure = judged(operands, cut.float())
    assert failure is None
    assert 0.1 < share < 0.7
    _, failure = judged(operands, torch.bmm(a.bfloat16().double(), b.bfloat16().double()).float())
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize("k", [1, 2, 3, 17])
def test_tf32_passes_where_little_is_left_of_a_sum(k: int) -> None:
    for seed in range(100):
        operands = Operands(Problem(m=1, n=1, k=k, dtype="tf32"), SMALL, HOST, seed=seed)
        a, b = operands.sets[0].a, operands.sets[0].b
        cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for x in (a, b)]
        _, failure = judged(operands, torch.bmm(*cut).float())
        assert failure is None, (seed, failure)


def test_the_reference_of_tf32_is_precise_while_the_default_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operands = Operands(Problem(m=32, n=16, k=64, dtype="tf32"), SMALL, HOST, seed=1)
    seen = []
    real = torch.mm

    def mm(*arguments: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return real(*arguments, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    before = torch.get_float32_matmul_precision()
    workload, problem = operands.workload, operands.problem
    for way in (*workload.defaults(problem), *workload.alternatives(problem)):
        way.launches(problem, operands.sets, operands.room)[0]()
    assert seen == ["high", "highest"]
    assert torch.get_float32_matmul_precision() == before
    assert workload.precision(problem) is torch.float64


@pytest.mark.parametrize("dtype", ["int8.out_bf16.scale_row", *ROWS])
def test_the_c_abi_is_given_factors_of_rows_one_by_one(dtype: str) -> None:
    operands = Operands(Problem(m=24, n=16, k=40, batch=2, dtype=dtype), SMALL, HOST, seed=1)
    second = operands.sets[1]
    filled = operands.arguments(second)
    assert second.scale_a is not None
    assert second.scale_b is not None
    assert (filled.scale_a, filled.scale_b) == (
        second.scale_a.data_ptr(),
        second.scale_b.data_ptr(),
    )
    assert (filled.batch_stride_scale_a, filled.batch_stride_scale_b) == (24, 16)
    assert filled.scaling == SCALING_CODES[Scaling.ROW] == 1
    assert (filled.alpha, filled.beta) == (1.0, 0.0)
    assert second.scale_a[1].data_ptr() - second.scale_a[0].data_ptr() == 24 * 4


def test_what_the_c_abi_is_given_beside() -> None:
    operands = Operands(Problem(m=24, n=16, k=64, dtype="int8.out_bf16"), SMALL, HOST, seed=1)
    filled = operands.arguments(operands.sets[0])
    assert filled.alpha == 2.0**-13
    assert filled.scale_a is None

    operands = Operands(
        Problem(m=24, n=16, k=64, dtype="bf16.out_f32.accumulate"), SMALL, HOST, seed=1
    )
    filled = operands.arguments(operands.sets[0], operands.check)
    assert (filled.alpha, filled.beta) == (1.0, 1.0)
    assert filled.c == filled.d == operands.check.data_ptr()
    assert filled.device == HOST


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3", "int8", "bf16.out_f32", "tf32"])
def test_poison_is_found_again_and_is_no_answer(dtype: str) -> None:
    operands = Operands(Problem(m=32, n=16, k=64, dtype=dtype), SMALL, HOST, seed=1)
    answer = right_answer(operands)
    assert untouched(answer) == 0
    operands.ready(answer)
    assert untouched(answer) == 32 * 16
    if answer.dtype.is_floating_point:
        assert answer.float().isnan().all()
    answer[0, :31] = 0
    assert untouched(answer) == 16
    _, failure = judged(operands, answer)
    assert failure is not None
    assert failure.kind is FailureKind.UNTOUCHED
    assert failure.message.startswith("16 of 512")


def test_poison_fills_elements_of_either_size() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int32):
        output = torch.zeros(2, 3, 5, dtype=dtype)
        poison(output)
        assert len(set(bits(output).flatten().tolist())) == 1


def test_what_the_new_operations_take_in_memory() -> None:
    def parts(dtype: str) -> tuple[int, int, int, int]:
        memory = footprint(Problem(m=128, n=256, k=512, batch=3, dtype=dtype))
        return memory.a, memory.d, memory.factors, memory.default

    a, d = 128 * 512 * 3, 128 * 256 * 3
    assert parts("bf16") == (2 * a, 2 * d, 0, 0)
    assert parts("tf32") == (4 * a, 4 * d, 0, 0)
    assert parts("int8") == (a, 4 * d, 0, 0)
    assert parts("int8.out_bf16") == (a, 2 * d, 0, 4 * d)
    factors = 4 * (128 + 256) * 3
    assert parts("int8.out_bf16.scale_row") == (a, 2 * d, factors, 8 * d)
    assert parts("fp8_e4m3.scale_row") == (a, 2 * d, factors, 0)
    plain, added = (
        footprint(Problem(m=128, n=256, k=512, dtype=dtype))
        for dtype in ("bf16.out_f32", "bf16.out_f32.accumulate")
    )
    assert added.verification - plain.verification == plain.d


def test_every_plain_operation_has_one_workload_and_others_are_refused_by_name() -> None:
    for dtype in (*DType, *NEW):
        for layout in layouts_of(dtype):
            operation = Operation.of(dtype, layout)
            assert sum(workload.covers(operation) for workload in WORKLOADS) == 1
    with pytest.raises(InvalidProblem, match=r"fp8_e4m3\.scale_block cannot be measured yet"):
        workload_of(Operation.of("fp8_e4m3.scale_block"))
