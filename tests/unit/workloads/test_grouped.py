"""Grouped products on the host: their operands, and which mistakes verification catches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from gemmsmith.core.kernel import AnyKernel
from gemmsmith.core.problem import Problem
from tests.support.candidates import KERNEL
from tests.support.grouped import DEPTH, FP8, OPERATIONS, ROWS, SMALL, WIDE, exact, problem_of
from tests.support.replacing import replace
from tuner.trial import Failure, FailureKind
from tuner.workloads.footprint import MAX_SETS, footprint, set_count
from tuner.workloads.operands import HOST, Operands
from tuner.workloads.reference import Reference
from tuner.workloads.spreads import Spread
from tuner.workloads.workload import OperandSet, drawn_with

TOKENS = [(96, 5), (1, 4), (64, 1), (3, 32), (1, 1)]

Change = Callable[[torch.Tensor, OperandSet], None]


def judged(
    operands: Operands, change: Change = lambda *_: None, only: int | None = None
) -> tuple[float, Failure | None]:
    """Error over its bound where every case is computed exactly, then changed (or one of them)."""
    problem = operands.problem

    def launch(i: int) -> None:
        s, written = operands.cases[i].operands, slice(0, operands.cases[i].written)
        operands.ready(s.d)
        s.d[:, written] = exact(problem, s, s.d)[:, written].to(s.d.dtype)
        if only is None or i == only:
            change(s.d, s)
        operands.check.copy_(s.d)

    kernel: AnyKernel = replace(KERNEL, dtype=problem.dtype, layout=problem.layout)
    correctness, failure = Reference(operands).check(kernel, claims_order=True, launch=launch)
    return (math.inf if correctness is None else correctness.error / correctness.tolerance), failure


@pytest.mark.parametrize(("tokens", "groups"), TOKENS)
@pytest.mark.parametrize(("dtype", "layout"), OPERATIONS)
def test_the_right_answer_passes(dtype: str, layout: str, tokens: int, groups: int) -> None:
    problem = problem_of(dtype, layout, tokens, groups)
    operands = Operands(problem, SMALL, HOST, seed=1)
    share, failure = judged(operands)
    assert failure is None
    assert share < 0.9
    assert [case.name for case in operands.cases] == [*Spread, "short"]


def test_all_tokens_may_be_one_groups() -> None:
    for dtype, layout in (*ROWS[:1], *WIDE):
        operands = Operands(problem_of(dtype, layout), SMALL, HOST, seed=1)
        for case in operands.cases:
            s, offsets = case.operands, drawn_with(case.operands.groups).offsets
            alone = replace(drawn_with(s.groups), ends=(0, 0, 96, 96, 96))
            offsets.copy_(torch.tensor(alone.ends))
            object.__setattr__(s, "groups", alone)
            object.__setattr__(case, "written", operands.check.shape[1])
        _, failure = judged(operands)
        assert failure is None


def _large(s: OperandSet) -> int:
    """The group with the most tokens."""
    sizes = [run.stop - run.start for run in drawn_with(s.groups).runs]
    return sizes.index(max(sizes))


def _last_row_zeroed(d: torch.Tensor, s: OperandSet) -> None:
    d[0, drawn_with(s.groups).ends[_large(s)] - 1] = 0


def _last_row_repeated(d: torch.Tensor, s: OperandSet) -> None:
    """As if a row before it had been computed in its place."""
    last = drawn_with(s.groups).ends[_large(s)] - 1
    d[0, last] = d[0, last - 1]


def _neighbours_weight(d: torch.Tensor, s: OperandSet) -> None:
    group = _large(s)
    run = drawn_with(s.groups).runs[group]
    d[0, run] = (s.a[0, run].double() @ s.b[group - 1].double()).to(d.dtype)


def _row_of_neighbour(d: torch.Tensor, s: OperandSet) -> None:
    """A group's first row belongs to the tile of the group before it."""
    group = _large(s)
    row = drawn_with(s.groups).runs[group].start
    d[0, row] = (s.a[0, row].double() @ s.b[group - 1].double()).to(d.dtype)


def _one_token_more(d: torch.Tensor, s: OperandSet) -> None:
    """The next group's first token, or the one before: what a tile without a mask takes in."""
    group = _large(s)
    run = drawn_with(s.groups).runs[group]
    token = run.stop if run.stop < s.b.shape[1] else run.start - 1
    d[group] += torch.outer(s.a[0, :, token].double(), s.b[0, token].double()).to(d.dtype)


def _one_token_less(d: torch.Tensor, s: OperandSet) -> None:
    token = drawn_with(s.groups).ends[_large(s)] - 1
    d[_large(s)] -= torch.outer(s.a[0, :, token].double(), s.b[0, token].double()).to(d.dtype)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize(
    "mistake", [_last_row_zeroed, _last_row_repeated, _neighbours_weight, _row_of_neighbour]
)
def test_a_wrong_row_of_any_case_is_caught(mistake: Change, case: int) -> None:
    operands = Operands(problem_of("bf16.group_rows", "tn", 2000, 7), SMALL, HOST, seed=1)
    _, failure = judged(operands, mistake, case)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    assert operands.cases[case].name in failure.message


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("mistake", [_one_token_more, _one_token_less])
@pytest.mark.parametrize(("dtype", "layout"), [DEPTH[0], *WIDE])
def test_a_token_at_the_wrong_group_is_caught(
    dtype: str, layout: str, mistake: Change, case: int
) -> None:
    operands = Operands(problem_of(dtype, layout, 2000, 7), SMALL, HOST, seed=1)
    _, failure = judged(operands, mistake, case)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_a_mistake_in_a_small_group_is_not_lost_beside_a_large_one() -> None:
    operands = Operands(problem_of("bf16.group_depth", "nt", 20000, 64), SMALL, HOST, seed=1)
    runs = drawn_with(operands.cases[2].operands.groups).runs
    sizes = [run.stop - run.start for run in runs]
    small = sizes.index(min(size for size in sizes if size))
    assert sizes[small] * 500 < max(sizes)

    def spoil(d: torch.Tensor, _: OperandSet) -> None:
        d[small] *= 1.01

    _, failure = judged(operands, spoil, 2)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_rows_of_no_group_stay_as_they_are() -> None:
    operands = Operands(problem_of("bf16.group_rows", "tn"), SMALL, HOST, seed=1)
    short = operands.cases[3]
    assert 0 < short.written < 96

    def spoil(d: torch.Tensor, _: OperandSet) -> None:
        d[0, short.written] = 0

    _, failure = judged(operands, spoil, 3)
    assert failure is not None
    assert failure.kind is FailureKind.WRONG
    assert failure.message.startswith("32 elements after the last group's rows were written")


@pytest.mark.parametrize("case", range(4))
def test_rows_that_were_never_written_are_told(case: int) -> None:
    operands = Operands(problem_of("bf16.group_rows", "tn"), SMALL, HOST, seed=1)

    def stale(d: torch.Tensor, s: OperandSet) -> None:
        poisoned = torch.empty_like(d)
        operands.ready(poisoned)
        last = drawn_with(s.groups).ends[-1] - 1
        d[0, last] = poisoned[0, last]

    _, failure = judged(operands, stale, case)
    assert failure is not None
    assert failure.kind is FailureKind.UNTOUCHED
    assert failure.message.startswith("32 of ")


def test_an_empty_groups_gradient_is_zero_and_written() -> None:
    operands = Operands(problem_of("bf16.group_depth", "nt", 200, 12), SMALL, HOST, seed=1)
    s = operands.cases[2].operands
    empty = next(i for i, run in enumerate(drawn_with(s.groups).runs) if run.start == run.stop)
    poisoned = torch.empty_like(operands.check)
    operands.ready(poisoned)
    for left, kind in (
        (poisoned[empty], FailureKind.UNTOUCHED),
        (torch.full_like(poisoned[empty], 0.1), FailureKind.WRONG),
    ):
        _, failure = judged(operands, lambda d, _, left=left: d[empty].copy_(left), 2)  # type: ignore[misc]
        assert failure is not None
        assert failure.kind is kind


def test_an_empty_groups_gradient_that_is_added_to_stays() -> None:
    operands = Operands(problem_of(*WIDE[1], 200, 12), SMALL, HOST, seed=1)
    s = operands.cases[2].operands
    empty = next(i for i, run in enumerate(drawn_with(s.groups).runs) if run.start == run.stop)
    _, failure = judged(operands, lambda d, _: d[empty].zero_(), 2)  # type: ignore[arg-type, return-value]
    assert failure is not None
    assert failure.kind is FailureKind.WRONG


def test_a_factor_at_the_wrong_place_is_caught() -> None:
    for dtype, layout in FP8:
        operands = Operands(problem_of(dtype, layout), SMALL, HOST, seed=1)

        def shifted(d: torch.Tensor, s: OperandSet) -> None:
            assert s.scale_b is not None
            wrong = replace(s, scale_b=s.scale_b.roll(1, 0))
            d.copy_(exact(operands.problem, wrong, d))  # noqa: B023

        _, failure = judged(operands, shifted, 0)
        assert failure is not None
        assert failure.kind is FailureKind.WRONG


@pytest.mark.parametrize(("dtype", "layout"), OPERATIONS)
def test_output_has_the_spread_that_is_said(dtype: str, layout: str) -> None:
    operands = Operands(problem_of(dtype, layout, 640, 5), SMALL, HOST, seed=1)
    s = operands.sets[0]
    operands.ready(s.d)
    assert 0.8 < exact(operands.problem, s, s.d).std() / operands.sigma < 1.25
    assert 0.5 < operands.sigma < 2


def test_sets_rotate_over_the_spreads_and_the_seed_changes_values_alone() -> None:
    problem = problem_of("bf16.group_rows", "tn")
    one, again, other = (Operands(problem, SMALL, HOST, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.sets[0].b, again.sets[0].b)
    assert not torch.equal(one.sets[0].b, other.sets[0].b)
    assert [drawn_with(s.groups).spread for s in one.sets] == [*Spread] * (len(one.sets) // 3)
    for s, t, u in zip(one.sets, again.sets, other.sets, strict=True):
        ends = drawn_with(s.groups).ends
        assert ends == drawn_with(t.groups).ends == drawn_with(u.groups).ends
        assert drawn_with(s.groups).offsets.dtype is torch.int32
        assert tuple(drawn_with(s.groups).offsets.tolist()) == ends
    short, otherwise = (drawn_with(each.cases[3].operands.groups).ends for each in (one, other))
    assert short != otherwise
    assert short == drawn_with(again.cases[3].operands.groups).ends


def test_sets_share_memory_where_one_leaves_the_cache_cold() -> None:
    def memories(problem: Problem, l2_bytes: int) -> tuple[int, int]:
        device = replace(SMALL, l2_bytes=l2_bytes)
        sets = Operands(problem, device, HOST, seed=1).sets
        assert len(sets) % 3 == 0
        return len({s.a.data_ptr() for s in sets}), len(sets)

    problem = problem_of("bf16.group_rows", "tn")
    one_set = footprint(problem).one_set
    assert memories(problem, one_set // 3) == (1, 3)
    assert memories(problem, one_set // 2) == (2, 6)
    assert memories(problem, one_set) == (3, 3)
    assert memories(problem, 4 * one_set // 3) == (6, 6)
    # Of 32 weights 4 are read at a time.
    few = problem_of("bf16.group_rows", "tn", 4, 32)
    assert memories(few, footprint(few).one_set // 3) == (1, 24)
    device = replace(SMALL, l2_bytes=2**40, memory_bytes=2**40)
    assert set_count(problem, device) == MAX_SETS - MAX_SETS % 3


def test_fewer_tokens_than_groups_meet_every_weight() -> None:
    operands = Operands(problem_of("bf16.group_rows", "tn", 4, 32), SMALL, HOST, seed=1)
    met = {
        group
        for s in operands.sets
        for group, run in enumerate(drawn_with(s.groups).runs)
        if run.start < run.stop
    }
    assert met == set(range(32))
