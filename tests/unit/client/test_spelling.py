"""Problems as users write them: other names of types, other libraries' integers, one line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from gemmsmith.core.elements import ELEMENTS
from gemmsmith.core.operands import OPERANDS
from gemmsmith.core.operation import (
    DType,
    Element,
    Layout,
    Operation,
    in_order,
    layouts_of,
    of_dtype,
)
from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.http.requests import calls_of, deadline_of, fields_of, problem_of


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.half, "fp16"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        (torch.int8, "int8"),
        (np.dtype("float16"), "fp16"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("fp8", "fp8_e4m3"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("e5m2", "fp8_e5m2"),
        ("bfloat16.out_f32", "bf16.out_f32"),
        ("torch.bfloat16", "bf16"),
        ("BF16.out_F32", "bf16.out_f32"),
        ("out_f32.accumulate", "bf16.out_f32.accumulate"),
        (DType.TF32, "tf32"),
    ],
)
def test_types_have_other_names(written: torch.dtype, dtype: str) -> None:
    assert Operation.of(written).dtype == dtype
    assert of_dtype(written) == of_dtype(dtype)
    assert layouts_of(written) == layouts_of(dtype)
    problem = Problem(512, 512, 512, dtype=written)
    assert problem == Problem(512, 512, 512, dtype=dtype)
    assert type(problem.dtype) is str
    assert fields_of(problem)["dtype"] == dtype
    assert problem_of(512, 512, 512, batch=1, dtype=written, layout="tn") == problem


def test_outputs_have_other_names() -> None:
    for name in (torch.float32, "float32", "fp32", "f32", Element.F32):
        assert Operation.of("bf16", out=name).dtype == "bf16.out_f32"
    assert Operation.of(torch.int8, out=torch.bfloat16).dtype == "int8.out_bf16"
    assert Operation.of("fp16", out=torch.float16).dtype == "fp16"


def test_other_names_belong_to_existing_types() -> None:
    assert set(OPERANDS.values()) <= set(DType)
    assert set(ELEMENTS.values()) <= set(Element)
    assert not set(OPERANDS) & set(DType)
    assert not set(ELEMENTS) & set(Element)
    assert in_order(["fp8", "bfloat16"]) == ("bfloat16", "fp8")


@pytest.mark.parametrize("dtype", [torch.float32, "float32", "fp32"])
def test_fp32_does_not_mean_tf32(dtype: str) -> None:
    with pytest.raises(InvalidProblem, match=r"products of FP32 operands: tf32"):
        Problem(512, 512, 512, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, "double", "torch.float64", None])
def test_an_unknown_type_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        Operation.of(dtype)


def test_stored_keys_have_a_single_spelling() -> None:
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        Operation.parse("bfloat16.tn")


def test_torch_is_not_imported_for_its_types() -> None:
    code = "import sys, gemmsmith; gemmsmith.Problem(1, 2, 3, dtype='bfloat16'); print(sorted(" \
        "{'torch', 'numpy'} & set(sys.modules)))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sizes_are_integers_of_any_library() -> None:
    problem = Problem(np.int64(4096), np.uint16(64), 32, batch=np.int32(3))
    assert problem == Problem(4096, 64, 32, batch=3)
    assert {type(getattr(problem, name)) for name in ("m", "n", "k", "batch")} == {int}
    assert Problem.of(Operation.of("bf16"), np.int64(4096), 64, 32, np.int8(3)) == problem
    assert (calls_of(np.int64(7)), deadline_of(np.int16(60))) == (7, 60)  # type: ignore[arg-type]


@pytest.mark.parametrize("m", [np.float64(4096), 4096.0, "4096", True, np.True_, None])
def test_other_numbers_are_no_sizes(m: int) -> None:
    with pytest.raises(InvalidProblem, match="m must be an integer") as caught:
        Problem(m, 64, 32)
    assert caught.value.field == "m"
    with pytest.raises(InvalidProblem, match="m must be in 1 … 2147483647, got 0"):
        Problem(np.int64(0), 64, 32)


def test_only_extents_go_by_position() -> None:
    assert Problem(1, 2, 3) == Problem(m=1, n=2, k=3)
    with pytest.raises(TypeError):
        Problem(1, 2, 3, 4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("4096x6144x1024", Problem(4096, 6144, 1024)),
        ("4096×6144×1024 fp8", Problem(4096, 6144, 1024, dtype="fp8_e4m3")),
        ("8x512*512x64 float16 nt", Problem(512, 512, 64, batch=8, dtype="fp16", layout="nt")),
        ("4096X6144x1024 BF16 NT", Problem(4096, 6144, 1024, layout="nt")),
        (
            "4096x6144x1024 bf16.out_f32.nt",
            Problem(4096, 6144, 1024, dtype="bf16.out_f32", layout="nt"),
        ),
        (
            "1×512×64×64 bf16.group_rows tt",
            Problem(512, 64, 64, dtype="bf16.group_rows", layout="tt"),
        ),
    ],
)
def test_a_problem_is_one_line(text: str, problem: Problem) -> None:
    assert Problem.parse(text) == problem
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(
    "text",
    ["", "4096", "4096x4096", "1x2x3x4x5", "x2x3", "1x2x", "-1x2x3", "1.0x2x3", "1x2x3 bf16 tn 5",
     "²x2x3", "9" * 20 + "x1x1"],
)  # fmt: skip
def test_other_lines_are_no_problem(text: str) -> None:
    with pytest.raises(InvalidProblem, match=r"written \[BATCHx\]MxNxK"):
        Problem.parse(text)


def test_refusals_of_a_line_name_the_part() -> None:
    with pytest.raises(InvalidProblem, match="m must be in"):
        Problem.parse("0x1x1")
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        Problem.parse("1x1x1 int4")
    with pytest.raises(InvalidProblem, match="layout must be one of"):
        Problem.parse("1x1x1 bf16 xx")


def test_a_problem_is_plain_data() -> None:
    problem = Problem(512, 256, 64, batch=2, dtype="bfloat16", layout="nt")
    assert problem.to_dict() == {
        "m": 512, "n": 256, "k": 64, "batch": 2, "dtype": "bf16", "layout": "nt",
    }  # fmt: skip
    assert msgspec.convert(problem.to_dict(), Problem) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert replace(problem, m=1) == Problem(1, 256, 64, batch=2, layout="nt")


def test_repr_recreates_the_object() -> None:
    for problem in (Problem(1, 2, 3), Problem(1, 2, 3, batch=4, dtype="fp16", layout=Layout.NN)):
        assert eval(repr(problem), {"Problem": Problem}) == problem
    assert repr(Problem(1, 2, 3)) == "Problem(1, 2, 3, dtype='bf16', layout='tn')"
    operation = Operation.of("bf16.out_f32.accumulate", "nt")
    assert eval(repr(operation), {"Operation": Operation}) == operation
    assert operation.to_dict() == {
        "types": "bf16", "layout": "nt", "out": "f32", "scaling": "none", "grouping": "none",
        "epilogue": "none", "accumulate": True, "symmetric": False, "summation": None,
    }  # fmt: skip
