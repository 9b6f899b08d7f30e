"""Bits of rows, for all operations that may demand an order: who has them, and who fails.

Kernels are played by exact products on the host, which give a row the same bits at every M.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.operation import Grouping, Operation
from gemmsmith.core.problem import Problem
from tests.support.candidates import named
from tests.support.judging import SMALL
from tuner.measure.order import RowBits, Run
from tuner.measure.relaunches import FEWEST
from tuner.trial import Failure, FailureKind
from tuner.workloads.operands import HOST, Operands, bits
from tuner.workloads.spreads import tokens_of
from tuner.workloads.workload import Block, OperandSet, drawn_with

OPERATIONS = (
    *(f"bf16.sum_sequential.{layout}" for layout in ("tn", "tt", "nt", "nn")),
    "fp16.sum_split_2.tn",
    "bf16.out_f32.sum_sequential.nn",
    "bf16.out_f32.accumulate.sum_sequential.nt",
    "bf16.out_f32.accumulate.sum_sequential.tn",
    "bf16.then_bias_gelu_aux.sum_sequential.tn",
    "bf16.then_bias_residual.sum_sequential.tt",
    "bf16.then_row_scale_bias.sum_sequential.tn",
    "bf16.then_silu_gate.sum_sequential.tn",
    "bf16.then_silu_gate_aux.sum_sequential.tn",
    "bf16.then_dgelu_act.sum_sequential.tt",
    "bf16.then_dsilu_gate_act.sum_sequential.tt",
    "fp8_e4m3.scale_row.sum_promoted.tn",
    "fp8_e5m2.scale_row.sum_sequential.tn",
)
BATCHED = ("bf16.sum_sequential.tn", "bf16.sum_sequential.nt", "fp8_e4m3.scale_row.sum_promoted.tn")
BY_ROWS = (
    *(f"bf16.group_rows.sum_sequential.{layout}" for layout in ("tn", "tt")),
    "fp16.out_f32.group_rows.sum_sequential.tn",
    "bf16.group_rows.then_silu_gate.sum_sequential.tn",
    "bf16.group_rows.then_silu_gate_aux.sum_sequential.tn",
    "bf16.group_rows.then_dsilu_gate_act.sum_sequential.tt",
    "fp8_e4m3.scale_row.group_rows.sum_sequential.tn",
)
BY_DEPTH = (
    "bf16.group_depth.sum_sequential.nt",
    "fp16.out_f32.group_depth.sum_sequential.nt",
    "bf16.out_f32.group_depth.accumulate.sum_sequential.nt",
    "fp8_e4m3.scale_row.group_depth.sum_sequential.tn",
)
PROBLEMS = (
    *(Problem.of(Operation.parse(key), m, 16, 32) for key in OPERATIONS for m in (1, 24, 250)),
    *(Problem.of(Operation.parse(key), 10, 16, 32, 3) for key in BATCHED),
)
SPREAD = tuple(
    Problem.of(Operation.parse(key), tokens, 16, 32, groups)
    for key in BY_ROWS
    for tokens, groups in ((1, 1), (2, 8), (24, 3), (250, 5))
)
DEEP = tuple(
    Problem.of(Operation.parse(key), 24, 16, tokens, groups)
    for key in BY_DEPTH
    for tokens, groups in ((160, 3), (512, 8))
)


def exact(operands: Operands, problem: Problem, launched: OperandSet) -> None:
    """Write the exact result, rounded once, as a kernel does: it reads and adds to D."""
    d = launched.d
    whole = Block(batches=slice(0, len(d)), rows=slice(0, d.shape[1]), columns=slice(0, d.shape[2]))
    result = operands.workload.product(problem, launched, whole)
    if problem.operation.accumulate:
        result = result + d
    d.copy_(result)
    if launched.row_gradient is not None:
        launched.row_gradient.copy_(d[0].double().sum(1, keepdim=True))


Spoil = Callable[[Problem, OperandSet], None]
"""Changes a launch's outputs."""


def judged(problem: Problem, *spoils: Spoil) -> list[Failure | None]:
    """The verdicts on candidates in turn; each spoils the outputs of every launch in its way."""
    operands = Operands(problem, SMALL, HOST, seed=3)
    order = RowBits(operands, seed=3)
    verdicts = []
    for i, spoil in enumerate(spoils):

        def run(here: Problem, launched: OperandSet) -> None:
            exact(operands, here, launched)
            spoil(here, launched)  # noqa: B023 - called before the next

        candidate: Candidate = named(f"c{i}")
        play: Run = run
        verdicts.append(order.failure(candidate, play))
    return verdicts


def right(_: Problem, __: OperandSet) -> None:
    """No other bits."""


def flips(where: tuple[int | slice, ...]) -> Spoil:
    def spoil(_: Problem, launched: OperandSet) -> None:
        bits(launched.d)[where] ^= 1

    return spoil


def flips_with_few_rows(problem: Problem, launched: OperandSet) -> None:
    if problem.m < FEWEST // 2:
        bits(launched.d)[:, :, 1] ^= 1


def flips_where_rows_lie(_: Problem, launched: OperandSet) -> None:
    bits(launched.d)[:, 0, 1] ^= 1


def flips_groups(depends: Callable[[Problem, OperandSet, slice], bool]) -> Spoil:
    """Spoils the results of the groups, or their last rows, for which this is true."""

    def spoil(problem: Problem, launched: OperandSet) -> None:
        for group, run in enumerate(drawn_with(launched.groups).runs):
            if run.start < run.stop and depends(problem, launched, run):
                where = (group,) if len(launched.d) == problem.batch > 1 else (0, run.stop - 1)
                bits(launched.d)[where] ^= 1

    return spoil


def other_token_behind(problem: Problem, launched: OperandSet, run: slice) -> bool:
    """Whether what lies behind a group is other than zeros: a tile may reach there."""
    by_rows = problem.operation.grouping is Grouping.ROWS
    tokens = launched.a[0] if by_rows else launched.a[0].T
    return bool(tokens[run.stop : run.stop + 1].float().any())


def empty_groups(_: Problem, launched: OperandSet, __: slice) -> bool:
    return len(set(drawn_with(launched.groups).ends)) < len(drawn_with(launched.groups).ends)


SPREAD_DEPENDS: dict[str, Callable[[Problem, OperandSet, slice], bool]] = {
    "the place": lambda _, __, run: run.start % 3 == 1,
    "the group before": lambda _, __, run: run.start > 0,
    "tokens of no group": lambda problem, launched, _: (
        drawn_with(launched.groups).ends[-1] < tokens_of(problem)
    ),
    "other tokens": other_token_behind,
    "empty groups": empty_groups,
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equal_bits_pass_and_others_fail(problem: Problem) -> None:
    other = flips((slice(None), slice(None), 3))
    verdicts = judged(problem, right, right, flips_with_few_rows, flips_where_rows_lie, other)
    assert verdicts[:2] == [None, None]
    for verdict in verdicts[2:]:
        assert verdict is not None
        assert verdict.kind is FailureKind.OTHER_BITS
    messages = [verdict.message for verdict in verdicts if verdict]
    assert "bits depend on M or on the row" in messages[1]
    assert messages[2].endswith("which adds in the same order, sequential")


def test_every_matrix_of_the_output_is_compared() -> None:
    """Aux and a second gradient have the bits of the order, too."""
    for key in OPERATIONS:
        problem = Problem.of(Operation.parse(key), 24, 16, 32)
        if problem.operation.epilogue.outputs > 1:
            last = flips((-1, -1, 0))
            assert judged(problem, right, last)[1] is not None, key


def test_few_rows_are_computed_among_more() -> None:
    """At M = 1 as well: there the whole launch itself is the one with few rows."""
    problem = Problem(1, 16, 32, dtype="bf16.sum_sequential")
    (verdict,) = judged(problem, flips_with_few_rows)
    assert verdict is not None


@pytest.mark.parametrize("problem", SPREAD, ids=str)
def test_a_token_has_its_bits_in_every_spread(problem: Problem) -> None:
    assert judged(problem, right, right) == [None, None]
    other = flips((slice(None), slice(None), 3))
    *_, verdict = judged(problem, right, other)
    assert verdict is not None
    assert verdict.message.endswith("which adds in the same order, sequential")


def test_sums_for_the_factors_are_compared() -> None:
    def spoil(problem: Problem, launched: OperandSet) -> None:
        assert launched.row_gradient is not None
        if problem.m == 24:
            launched.row_gradient.add_(1)

    (key,) = (key for key in BY_ROWS if "then_d" in key)
    (verdict,) = judged(Problem.of(Operation.parse(key), 24, 16, 32, 3), spoil)
    assert verdict is not None


@pytest.mark.parametrize("name", SPREAD_DEPENDS)
@pytest.mark.parametrize("problem", [*(p for p in SPREAD if p.batch in (3, 5)), *DEEP], ids=str)
def test_a_kernel_that_depends_on_the_spread_is_refused(problem: Problem, name: str) -> None:
    (verdict,) = judged(problem, flips_groups(SPREAD_DEPENDS[name]))
    assert verdict is not None
    assert verdict.kind is FailureKind.OTHER_BITS


@pytest.mark.parametrize("problem", DEEP, ids=str)
def test_a_groups_gradient_depends_on_its_own_tokens_alone(problem: Problem) -> None:
    own = flips_groups(lambda _, launched, run: bool(launched.b[0, run.start, 0].float() > 0))
    many = flips_groups(lambda _, __, run: (run.stop - run.start) % 32 != 0)
    for spoil in (right, own, many):
        assert judged(problem, spoil, spoil) == [None, None]
    verdicts = judged(problem, right, flips((0, 1, 2)), flips((slice(None), slice(None), 3)))
    messages = [verdict.message for verdict in verdicts if verdict]
    assert len(messages) == 2
    assert messages[0].endswith("bits depend on other groups' tokens")
    assert messages[1].endswith("which adds in the same order, sequential")
