"""`numerics=invariant` of operations and problems: the order that it means, and who has none."""

from __future__ import annotations

import pytest

from gemmsmith.core.numerics import Numerics, invariant, with_numerics
from gemmsmith.core.operation import of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        ("bf16", "sequential"),
        ("fp16.out_f32.accumulate", "sequential"),
        ("bf16.then_silu_gate_aux", "sequential"),
        ("bf16.group_rows", "sequential"),
        ("bf16.group_depth", "sequential"),
        ("bf16.group_rows.then_dsilu_gate_act", "sequential"),
        ("fp8_e4m3.scale_row", "sequential"),
        ("fp8_e4m3.scale_row.group_rows", "sequential"),
    ],
)
def test_it_is_always_sequential(dtype: str, order: str) -> None:
    operation = of_dtype(dtype)
    demanded = invariant(operation)
    assert demanded.dtype == f"{dtype}.sum_{order}"
    problem = Problem.of(operation, 64, 128, 256, 8 if operation.is_grouped else 1)
    assert with_numerics(problem, None) is problem
    assert with_numerics(problem, "invariant").operation == demanded


def test_without_fast_accumulation_it_is_promoted() -> None:
    precise = invariant(of_dtype("fp8_e4m3.scale_row"), precise=True)
    assert precise.dtype == "fp8_e4m3.scale_row.sum_promoted"
    with pytest.raises(InvalidProblem, match="does not exist for grouped products"):
        invariant(of_dtype("fp8_e4m3.scale_row.group_rows"), precise=True)


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("bf16.sum_sequential", "names its order of sums already: leave out numerics"),
        ("bf16.sum_split_4", "names its order of sums already: leave out numerics"),
        ("int8", "the same in every order: leave out numerics"),
        ("int8.out_bf16.scale_row", "the same in every order: leave out numerics"),
        ("tf32", "does not exist for this operation"),
        ("fp8_e4m3", "does not exist for this operation"),
        ("bf16.then_dgelu_bgrad", "without sums of rows"),
    ],
)
def test_what_has_an_order_or_cannot_have_it_is_refused(dtype: str, says: str) -> None:
    with pytest.raises(InvalidProblem, match=says) as raised:
        with_numerics(Problem.of(of_dtype(dtype), 64, 64, 64), "invariant")
    assert raised.value.field == "numerics"


def test_another_word_is_refused() -> None:
    assert [*Numerics] == ["invariant"]
    for word in ("", "Invariant", "bitwise", "invarant"):
        with pytest.raises(InvalidProblem, match="numerics must be one of invariant"):
            with_numerics(Problem(1, 2, 3), word)
