"""Operations with an order of sums: their keys, which of them exist, and their neighbours."""

from __future__ import annotations

import pytest

from gemmsmith.core.operation import Operation, of_dtype
from gemmsmith.core.problem import Problem
from gemmsmith.core.summation import split, splits_of
from gemmsmith.errors import InvalidProblem
from tests.support.replacing import replace

ORDERS = ("sequential", "promoted", "mma", "split_2", "split_7", "split_16", "promoted_split_4")
NOT_ORDERS = ("", "split_1", "split_0", "split_02", "split_4097", "split", "mma_split_2", "other")


def test_orders_are_written_in_one_way() -> None:
    assert all(splits_of(order) for order in ORDERS)
    assert not any(splits_of(order) for order in NOT_ORDERS)
    assert (splits_of("sequential"), splits_of("split_7")) == (1, 7)
    assert (split("sequential", 4), split("promoted", 4)) == ("split_4", "promoted_split_4")


@pytest.mark.parametrize(
    "dtype",
    [
        "bf16.sum_sequential",
        "fp16.sum_mma",
        "bf16.sum_split_4",
        "bf16.out_f32.sum_sequential",
        "bf16.out_f32.accumulate.sum_sequential",
        "bf16.then_bias_gelu.sum_sequential",
        "bf16.then_silu_gate_aux.sum_sequential",
        "bf16.then_dsilu_gate_act.sum_sequential",
        "bf16.group_rows.sum_sequential",
        "bf16.out_f32.group_rows.sum_sequential",
        "fp16.group_rows.then_silu_gate.sum_sequential",
        "bf16.group_rows.then_silu_gate_aux.sum_sequential",
        "bf16.group_rows.then_dsilu_gate_act.sum_sequential",
        "bf16.group_depth.sum_sequential",
        "bf16.out_f32.group_depth.accumulate.sum_sequential",
        "fp8_e4m3.scale_row.group_rows.sum_sequential",
        "fp8_e4m3.scale_row.sum_promoted",
        "fp8_e4m3.scale_row.sum_sequential",
        "fp8_e5m2.scale_row.sum_promoted_split_2",
    ],
)
def test_an_order_is_a_part_of_the_operation(dtype: str) -> None:
    operation = of_dtype(dtype)
    assert operation.dtype == dtype
    assert Operation.parse(operation.key) == operation
    order = operation.summation
    assert order is not None
    plain = replace(operation, summation=None)
    assert plain.dtype == dtype.removesuffix(f".sum_{order}")
    assert operation != plain
    assert operation.of_kernels == plain.of_kernels
    assert operation.of_kernels.summation is None
    again = Operation.of(dtype, operation.layout, accumulate=operation.accumulate)
    assert again == operation


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("bf16.sum_promoted", "for FP8 it does"),
        ("bf16.sum_promoted_split_2", "for FP8 it does"),
        ("bf16.sum_sequentail", "did you mean sum_sequential"),
        ("bf16.sum", "must be one of sum_sequential"),
        ("bf16.sum_split_1", "must be one of sum_sequential"),
        ("bf16.sum_split_2.sum_split_4", "is spelt"),
        ("bf16.sum_sequential.out_f32", "is spelt 'bf16.out_f32.sum_sequential'"),
        ("int8.sum_sequential", "does not exist"),
        ("tf32.sum_sequential", "does not exist"),
        ("fp8_e4m3.sum_promoted", "does not exist"),
        ("bf16.group_rows.sum_mma", "for grouped products: sum_sequential does"),
        ("bf16.group_rows.sum_split_4", "for grouped products: sum_sequential does"),
        ("fp8_e4m3.scale_row.group_rows.sum_promoted", "for grouped products: sum_sequential does"),
        ("bf16.then_dgelu_bgrad.sum_sequential", "without sums of rows"),
    ],
)
def test_what_has_no_order_is_refused(dtype: str, says: str) -> None:
    with pytest.raises(InvalidProblem, match=says) as raised:
        Operation.of(dtype)
    assert raised.value.field == "dtype"


@pytest.mark.parametrize(
    ("dtype", "layout", "free"),
    [
        ("bf16.sum_sequential", "tn", "m"),
        ("bf16.sum_sequential", "tt", "m"),
        ("bf16.sum_sequential", "nt", "k"),
        ("bf16.group_rows.sum_sequential", "tn", "m"),
        ("bf16.group_depth.sum_sequential", "nt", "k"),
    ],
)
def test_neighbours_of_an_ordered_problem_have_its_operation(
    dtype: str, layout: str, free: str
) -> None:
    """Weights differ in all but the number of tokens."""
    here = Problem(512, 4096, 1024, batch=8, dtype=dtype, layout=layout)
    for name in ("m", "n", "k", "batch"):
        other = replace(here, **{name: 16})
        assert here.kind == other.kind
        assert (here.weight == other.weight) == (name == free)
    for other in (replace(here, dtype="bf16.sum_mma"), replace(here, dtype="bf16")):
        assert here.kind != other.kind


def test_short_forms_and_suggestions() -> None:
    assert Operation.read("sum_sequential nt").key == "bf16.sum_sequential.nt"
    with pytest.raises(InvalidProblem, match="did you mean sum_sequential"):
        Operation.of("bf16.sums_sequential")
