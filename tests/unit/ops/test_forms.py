"""From strides to layout letters and leading dimensions."""

from __future__ import annotations

import pytest
import torch

from gemmsmith.core.problem import DType
from gemmsmith.ops.engine.forms import Form, Spec, batched, folded, operation_of, shapes

BF16 = torch.bfloat16


def spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.dtype, tensor.device, tensor.size(), tensor.stride())


def bf16(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=BF16)


@pytest.mark.parametrize(
    ("form", "a", "b", "layout", "sizes", "output"),
    [
        (Form.LINEAR, bf16(7, 20), bf16(30, 20), "tn", (7, 30, 20, 1), (7, 30)),
        (Form.LINEAR, bf16(2, 7, 20), bf16(30, 20), "tn", (14, 30, 20, 1), (2, 7, 30)),
        (Form.LINEAR, bf16(1, 20), bf16(1, 20), "tn", (1, 1, 20, 1), (1, 1)),
        (Form.MATMUL, bf16(2, 7, 30), bf16(30, 20), "tt", (14, 20, 30, 1), (2, 7, 20)),
        (Form.WEIGHT_GRADIENT, bf16(2, 7, 30), bf16(2, 7, 20), "nt", (30, 20, 14, 1), (30, 20)),
        (Form.MATMUL, bf16(5, 4, 3), bf16(5, 3, 2), "tt", (4, 2, 3, 5), (5, 4, 2)),
        (Form.MATMUL, bf16(5, 4, 3), bf16(5, 2, 3).mT, "tn", (4, 2, 3, 5), (5, 4, 2)),
        (Form.MATMUL, bf16(2, 6, 4, 3), bf16(2, 6, 2, 3).mT, "tn", (4, 2, 3, 12), (2, 6, 4, 2)),
        (Form.MATMUL, bf16(20, 7).t(), bf16(30, 20).t(), "nn", (7, 30, 20, 1), (7, 30)),
    ],
)
def test_layouts(form, a, b, layout, sizes, output) -> None:
    found = shapes(form, spec(a), spec(b))[0]
    problem = found.problem
    assert problem.layout == layout
    assert (problem.m, problem.n, problem.k, problem.batch) == sizes
    assert problem.dtype == DType.BF16
    assert found.output == output


def test_a_padded_row_is_a_leading_dimension() -> None:
    found = shapes(Form.LINEAR, spec(bf16(7, 32)[:, :20]), spec(bf16(30, 48)[:, :20]))[0]
    assert (found.lda, found.ldb) == (32, 48)


@pytest.mark.parametrize(
    ("form", "a", "b"),
    [
        (Form.LINEAR, bf16(7, 20), bf16(30, 21)),
        (Form.LINEAR, bf16(0, 20), bf16(30, 20)),
        (Form.LINEAR, bf16(20), bf16(30, 20)),
        (Form.LINEAR, bf16(7, 40)[:, ::2], bf16(30, 20)),
        (Form.LINEAR, bf16(1, 1).expand(7, 20), bf16(30, 20)),
        (Form.LINEAR, bf16(7, 2, 20).transpose(0, 1), bf16(30, 20)),
        (Form.LINEAR, torch.empty(7, 20).double(), torch.empty(30, 20).double()),
        (Form.LINEAR, bf16(7, 20), torch.empty(30, 20, dtype=torch.float16)),
        (Form.LINEAR, bf16(7, 20), bf16(30, 20).to("meta")),
        (Form.MATMUL, bf16(5, 4, 3), bf16(1, 3, 2)),
        (Form.WEIGHT_GRADIENT, bf16(7, 30), bf16(8, 20)),
    ],
)
def test_what_no_kernel_can_take(form, a, b) -> None:
    assert shapes(form, spec(a), spec(b)) == ()


F32, S32, S8, E4M3 = torch.float32, torch.int32, torch.int8, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("form", "operand", "output", "dtype"),
    [
        (Form.MATMUL, BF16, None, "bf16"),
        (Form.MATMUL, BF16, BF16, "bf16"),
        (Form.MATMUL, BF16, F32, "bf16.out_f32"),
        (Form.MATMUL, torch.float16, F32, "fp16.out_f32"),
        (Form.ADDED, BF16, F32, "bf16.out_f32.accumulate"),
        (Form.ADDED_GRADIENT, BF16, None, "bf16.out_f32.accumulate"),
        (Form.ADDED, BF16, BF16, None),
        (Form.MATMUL, BF16, torch.float16, None),
        (Form.MATMUL, BF16, torch.float64, None),
        (Form.SCALED, BF16, None, None),
        (Form.SCALED, E4M3, None, "fp8_e4m3"),
        (Form.MATMUL, E4M3, None, None),
        (Form.MATMUL, S8, None, "int8"),
        (Form.MATMUL, S8, S32, "int8"),
        (Form.MATMUL, S8, BF16, "int8.out_bf16"),
        (Form.ROW_SCALED, S8, None, "int8.out_bf16.scale_row"),
        (Form.ROW_SCALED, S8, S32, None),
        (Form.ROW_SCALED_PRECISE, S8, None, None),
        (Form.ROW_SCALED, E4M3, None, "fp8_e4m3.scale_row"),
        (Form.ROW_SCALED_PRECISE, E4M3, None, "fp8_e4m3.scale_row"),
        (Form.ROW_SCALED, BF16, None, None),
        (Form.LINEAR, F32, None, "tf32"),
        (Form.ADDED_GRADIENT, F32, F32, "tf32.accumulate"),
    ],
)
def test_operations(form, operand, output, dtype) -> None:
    found = operation_of(form, operand, operand, output)
    assert (None if found is None else found.dtype) == dtype


def test_fp8_is_tn_only() -> None:
    a = torch.empty(16, 32, dtype=torch.float8_e4m3fn)
    b = torch.empty(8, 32, dtype=torch.float8_e4m3fn)
    assert [s.problem.layout for s in shapes(Form.SCALED, spec(a), spec(b.t()))] == ["tn"]
    assert shapes(Form.SCALED, spec(a), spec(torch.empty(32, 8, dtype=b.dtype))) == ()
    gradient = torch.empty(16, 32, dtype=torch.float8_e5m2)
    assert shapes(Form.SCALED, spec(gradient), spec(b.t()))[0].problem.dtype == DType.FP8_E5M2


def test_dimensions_fold_where_view_would() -> None:
    for tensor in (bf16(2, 3, 8), bf16(1, 3, 8), bf16(3, 1, 8), bf16(2, 3, 16)[..., :8]):
        rows = folded(tensor.size(), tensor.stride())
        assert rows is not None
        view = tensor.view(-1, 8)
        assert (rows.rows, rows.row_stride) == (view.shape[0], view.stride(0))
    crossed = bf16(2, 3, 8).transpose(0, 1)
    assert folded(crossed.size(), crossed.stride()) is None
    repeated = bf16(4, 8).expand(5, 4, 8)
    once = batched(repeated.size(), repeated.stride())
    assert once is not None
    assert (once.batch, once.batch_stride) == (5, 0)
