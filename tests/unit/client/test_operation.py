"""Operations: each has a unique text, and only existing combinations have one."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from gemmsmith.core.operation import (
    DType,
    Element,
    Epilogue,
    Grouping,
    Layout,
    Operation,
    Scaling,
    in_order,
    layouts_of,
)
from gemmsmith.errors import InvalidProblem


@cache
def every() -> list[Operation]:
    """All valid combinations of parts."""
    operations = []
    for types, layout, out, scaling, grouping, epilogue, accumulate in product(
        DType, Layout, Element, Scaling, Grouping, Epilogue, (False, True)
    ):
        try:
            operation = Operation(
                types=types,
                layout=layout,
                out=out,
                scaling=scaling,
                grouping=grouping,
                epilogue=epilogue,
                accumulate=accumulate,
            )
        except InvalidProblem:
            continue
        operations.append(operation)
    return operations


def test_every_type_exists_in_some_combination() -> None:
    assert {operation.types for operation in every()} == set(DType)
    assert {operation.layout for operation in every()} == set(Layout)
    assert {operation.scaling for operation in every()} == set(Scaling)
    assert {operation.grouping for operation in every()} == set(Grouping)
    assert {operation.epilogue for operation in every()} == set(Epilogue)
    assert any(operation.accumulate for operation in every())


def test_keys_are_read_back() -> None:
    for operation in every():
        assert Operation.parse(operation.key) == operation
        assert Operation.of(operation.dtype, operation.layout) == operation
        assert operation.key == f"{operation.dtype}.{operation.layout}"


def test_equal_operations_and_no_others_have_equal_keys() -> None:
    assert len(set(every())) == len(every())
    assert len({operation.key for operation in every()}) == len(every())


def test_parts_may_be_passed_separately() -> None:
    for operation in every():
        again = Operation.of(
            operation.types,
            operation.layout,
            out=operation.out,
            scaling=operation.scaling,
            grouping=operation.grouping,
            epilogue=operation.epilogue,
            accumulate=operation.accumulate,
        )
        assert (again, again.key) == (operation, operation.key)


def test_omitted_parts_follow_from_the_dtype() -> None:
    operation = Operation.of("bf16.out_f32", "nt", accumulate=True)
    assert operation.key == "bf16.out_f32.accumulate.nt"
    assert Operation.of(operation.dtype, "nt", accumulate=False).dtype == "bf16.out_f32"
    assert Operation.of("bf16.out_f32", out="bf16").dtype == "bf16"
    assert Operation.of("fp8_e4m3", scaling="block", grouping="rows").key == (
        "fp8_e4m3.scale_block.group_rows.tn"
    )


@pytest.mark.parametrize(
    ("dtype", "a", "b", "accumulator", "d", "scaling"),
    [
        ("bf16", Element.BF16, Element.BF16, Element.F32, Element.BF16, Scaling.NONE),
        ("fp16", Element.F16, Element.F16, Element.F32, Element.F16, Scaling.NONE),
        ("fp8_e4m3", Element.E4M3, Element.E4M3, Element.F32, Element.BF16, Scaling.TENSOR),
        ("fp8_e5m2", Element.E5M2, Element.E4M3, Element.F32, Element.BF16, Scaling.TENSOR),
        ("int8", Element.S8, Element.S8, Element.S32, Element.S32, Scaling.NONE),
        ("tf32", Element.TF32, Element.TF32, Element.F32, Element.F32, Scaling.NONE),
    ],
)
def test_meaning_of_short_names(
    dtype: str, a: Element, b: Element, accumulator: Element, d: Element, scaling: Scaling
) -> None:
    operation = Operation.of(dtype)
    assert (operation.a, operation.b, operation.accumulator, operation.d) == (a, b, accumulator, d)
    assert (operation.scaling, operation.is_scaled) == (scaling, scaling is not Scaling.NONE)
    assert (operation.grouping, operation.epilogue) == (Grouping.NONE, Epilogue.NONE)
    assert not operation.accumulate
    assert operation.is_plain
    assert (operation.dtype, operation.key, str(operation)) == (dtype, f"{dtype}.tn", f"{dtype} tn")
    assert operation.is_narrow_float is dtype.startswith("fp8")


def test_every_short_name_has_a_meaning() -> None:
    assert {operation.dtype for operation in every() if operation.is_plain} == set(DType)


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"dtype": "int4"}, "dtype", "bf16, fp16, fp8_e4m3, fp8_e5m2, int8, tf32"),
        ({"dtype": "bf61"}, "dtype", r"tf32, got 'bf61'; did you mean bf16\?"),
        ({"dtype": "bf16.groop_rows"}, "dtype", "did you mean group_rows"),
        ({"dtype": "bf16.bias_gelu"}, "dtype", "did you mean then_bias_gelu"),
        ({"dtype": "bf16.then_bias_gelo"}, "epilogue", "54 names, got 'bias_gelo'; did you mean "),
        ({"dtype": ""}, "dtype", "must be one of"),
        ({"layout": "tx"}, "layout", "tn, tt, nt, nn"),
        ({"dtype": "fp8_e4m3", "layout": "nn"}, "layout", "needs layout tn"),
        ({"dtype": "int8", "layout": "tt"}, "layout", "needs layout tn"),
        ({"out": "f16"}, "out", "must be one of bf16, f32 for bf16"),
        ({"out": "half"}, "out", "must be one of bf16, f16"),
        ({"dtype": "tf32", "out": "bf16"}, "out", "must be one of f32 for tf32"),
        ({"scaling": "tensor"}, "scaling", "must be one of none for bf16"),
        ({"dtype": "fp8_e4m3", "scaling": "none"}, "scaling", "tensor, row, block for fp8_e4m3"),
        ({"dtype": "int8", "scaling": "row"}, "scaling", "needs out=bf16"),
        ({"scaling": "column"}, "scaling", "none, tensor, row, block"),
        ({"grouping": "columns"}, "grouping", "none, rows, depth"),
        ({"epilogue": "tanh"}, "epilogue", "none"),
        ({"accumulate": True}, "accumulate", "needs out=f32, not bf16"),
        ({"dtype": "int8", "accumulate": True}, "accumulate", "needs out=f32, not s32"),
        # A dtype has a single spelling.
        ({"dtype": "bf16.fast"}, "dtype", "unknown part 'fast'"),
        ({"dtype": "bf16."}, "dtype", "unknown part ''"),
        ({"dtype": "bf16.out_f32.accumulates"}, "dtype", "unknown part 'accumulates'"),
        ({"dtype": "bf16.scaling_row"}, "dtype", "unknown part 'scaling_row'"),
        ({"dtype": "bf16.out_bf16"}, "dtype", "is spelt 'bf16'"),
        ({"dtype": "bf16.accumulate.out_f32"}, "dtype", "is spelt 'bf16.out_f32.accumulate'"),
        ({"dtype": "bf16.out_f32.out_f32"}, "dtype", "is spelt 'bf16.out_f32'"),
        ({"dtype": "bf16.out_f32.accumulate_"}, "dtype", "unknown part 'accumulate_'"),
        (
            {"dtype": "fp8_e4m3.group_rows.scale_row"},
            "dtype",
            "is spelt 'fp8_e4m3.scale_row.group_rows'",
        ),
        # Epilogues.
        ({"dtype": "int8", "epilogue": "bias"}, "epilogue", ""),
        ({"dtype": "tf32", "epilogue": "bias"}, "epilogue", ""),
        ({"dtype": "fp8_e5m2", "epilogue": "bias"}, "epilogue", ""),
        ({"dtype": "bf16.out_f32", "epilogue": "bias"}, "out", ""),
        ({"dtype": "fp8_e4m3", "epilogue": "bias", "scaling": "row"}, "scaling", ""),
        ({"dtype": "fp8_e4m3", "epilogue": "bias", "scaling": "block"}, "scaling", ""),
        ({"epilogue": "bias", "grouping": "rows"}, "grouping", ""),
        ({"layout": "nt", "epilogue": "bias"}, "layout", ""),
        ({"layout": "nn", "epilogue": "bias"}, "layout", ""),
        ({"epilogue": "gelu"}, "epilogue", ""),
        ({"layout": "tt", "epilogue": "silu_gate"}, "layout", ""),
        ({"dtype": "bf16.out_f32", "epilogue": "silu_gate"}, "out", ""),
        ({"dtype": "fp8_e4m3", "epilogue": "dgelu"}, "epilogue", ""),
        ({"layout": "nt", "epilogue": "dsilu_gate"}, "layout", ""),
        ({"layout": "nt", "epilogue": "scale_residual"}, "layout", ""),
        ({"dtype": "bf16.out_f32", "epilogue": "row_scale"}, "out", ""),
        ({"epilogue": "row_scale", "grouping": "rows"}, "grouping", ""),
        ({"dtype": "fp8_e4m3", "epilogue": "row_scale", "scaling": "row"}, "scaling", ""),
        # Epilogues into FP8.
        ({"out": "e4m3", "epilogue": "bias"}, "out", ""),
        ({"dtype": "fp8_e5m2", "out": "e4m3", "epilogue": "bias"}, "out", ""),
        ({"dtype": "int8", "out": "e4m3", "epilogue": "bias"}, "out", ""),
        ({"dtype": "fp8_e4m3", "out": "e4m3", "epilogue": "bias", "scaling": "row"}, "scaling", ""),
        ({"dtype": "fp8_e4m3", "out": "e4m3", "epilogue": "dgelu"}, "epilogue", ""),
        (
            {"dtype": "fp8_e4m3", "out": "e4m3", "epilogue": "bias", "accumulate": True},
            "accumulate",
            "",
        ),
        ({"dtype": "fp8_e4m3", "out": "e5m2", "epilogue": "bias"}, "out", ""),
        # Groups.
        ({"dtype": "int8", "grouping": "rows"}, "grouping", ""),
        ({"dtype": "tf32", "grouping": "depth"}, "grouping", ""),
        ({"dtype": "fp8_e4m3", "grouping": "rows"}, "scaling", ""),
        ({"layout": "nt", "grouping": "rows"}, "layout", ""),
        ({"grouping": "depth"}, "layout", ""),
        ({"grouping": "rows", "out": "f32", "accumulate": True}, "accumulate", ""),
    ],
)
def test_errors_name_the_field_and_its_valid_values(
    arguments: dict[str, object], field: str, message: str
) -> None:
    with pytest.raises(InvalidProblem, match=message or None) as caught:
        Operation.of(**{"dtype": "bf16", **arguments})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("key", ["", "bf16", "bf16.", "bf16.out_f32", "tn", ".tn", "bf16 tn"])
def test_an_invalid_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidProblem):
        Operation.parse(key)


def test_layouts_of_a_dtype_are_those_that_exist() -> None:
    for dtype in {operation.dtype for operation in every()}:
        wanted = {operation.layout for operation in every() if operation.dtype == dtype}
        assert set(layouts_of(dtype)) == wanted
    assert layouts_of("bf16") == (Layout.TN, Layout.TT, Layout.NT, Layout.NN)
    assert layouts_of("int8") == (Layout.TN,)
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        layouts_of("int4")
    with pytest.raises(InvalidProblem, match="out must be one of"):
        layouts_of("tf32.out_bf16")


def test_dtypes_in_order_are_by_short_name_and_then_by_the_rest() -> None:
    assert in_order(reversed(DType)) == tuple(DType)
    mixed = ["tf32", "bf16.out_f32", "bf16.group_depth", "fp16", "bf16", "fp16", "bf16"]
    assert in_order(mixed) == ("bf16", "bf16.group_depth", "bf16.out_f32", "fp16", "tf32")
    assert in_order([]) == ()
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        in_order(["bf16", "int4"])
