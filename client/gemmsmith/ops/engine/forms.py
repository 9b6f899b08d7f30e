"""The products that operators compute, as kernels see them: from strides to layout letters.

This is arithmetic on sizes and strides, which works for real and for traced tensors and makes no
views. A product has no `Shape` if no kernel reads its operands as they lie in memory: then torch's
own operator runs.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from gemmsmith.core.operation import DType, Element, Epilogue, Grouping, Layout, Operation, Scaling
from gemmsmith.core.problem import MAX_EXTENT, Problem
from gemmsmith.errors import InvalidProblem
from gemmsmith.ops.engine.settings import allows_tf32


class Form(Enum):
    """A product of two tensors, by how their dimensions are multiplied."""

    MATMUL = "matmul"  # a[..., M, K] · b[K, N] or b[..., K, N] of the same batch
    LINEAR = "linear"  # a[..., K] · b[N, K]ᵀ
    LINEAR_BIAS = "linear_bias"  # the same, and a bias is added, by the kernel or afterwards
    WEIGHT_GRADIENT = "weight_gradient"  # a[..., M]ᵀ · b[..., N], over all leading dimensions
    SCALED = "scaled"  # a[M, K] · b[K, N] in FP8, times two scales, however it accumulates
    SCALED_PRECISE = "scaled_precise"  # the same; the tensor core's sums are promoted to FP32
    ROW_SCALED = "row_scaled"  # a[M, K] · b[K, N], times a factor per row and one per column
    ROW_SCALED_PRECISE = "row_scaled_precise"  # the same in FP8; the sums are promoted to FP32
    SYMMETRIC = "symmetric"  # a[..., N, K] · b[..., K, N], where b is a transposed view of a
    ADDED = "added"  # a MATMUL that is added to its output
    ADDED_GRADIENT = "added_gradient"  # a WEIGHT_GRADIENT that is added to its output
    # a[T, K] · b[E, K, N] by runs of rows, or a[M, T] · b[T, N] by runs of T, a matrix for each
    GROUPED = "grouped"
    GROUPED_SCALED = "grouped_scaled"  # the same in FP8, times a factor per row and one per column
    GROUPED_SCALED_PRECISE = "grouped_scaled_precise"  # the same; the sums are promoted to FP32

    @property
    def adds(self) -> bool:
        return self in (Form.ADDED, Form.ADDED_GRADIENT)

    @property
    def is_grouped(self) -> bool:
        """Whether each run of tokens is multiplied with a matrix of its own."""
        return self in (Form.GROUPED, Form.GROUPED_SCALED, Form.GROUPED_SCALED_PRECISE)

    @property
    def is_precise(self) -> bool:
        return self in (Form.SCALED_PRECISE, Form.ROW_SCALED_PRECISE, Form.GROUPED_SCALED_PRECISE)

    @classmethod
    def scaled(cls, *, by_rows: bool, fast: bool) -> Form:
        if by_rows:
            return cls.ROW_SCALED if fast else cls.ROW_SCALED_PRECISE
        return cls.SCALED if fast else cls.SCALED_PRECISE


_TYPES = {
    (torch.bfloat16, torch.bfloat16): DType.BF16,
    (torch.float16, torch.float16): DType.FP16,
    (torch.float8_e4m3fn, torch.float8_e4m3fn): DType.FP8_E4M3,
    (torch.float8_e5m2, torch.float8_e4m3fn): DType.FP8_E5M2,
    (torch.int8, torch.int8): DType.INT8,
    (torch.float32, torch.float32): DType.TF32,
}
"""Element types of A and B that kernels exist for."""

_OUTPUTS = {
    torch.bfloat16: Element.BF16,
    torch.float16: Element.F16,
    torch.float32: Element.F32,
    torch.int32: Element.S32,
    torch.float8_e4m3fn: Element.E4M3,
}

_SCALINGS = {
    Form.SCALED: Scaling.TENSOR,
    Form.SCALED_PRECISE: Scaling.TENSOR,
    Form.ROW_SCALED: Scaling.ROW,
    Form.ROW_SCALED_PRECISE: Scaling.ROW,
    Form.GROUPED_SCALED: Scaling.ROW,
    Form.GROUPED_SCALED_PRECISE: Scaling.ROW,
}


@functools.lru_cache(maxsize=1024)
def operation_of(
    form: Form,
    a: torch.dtype,
    b: torch.dtype,
    output: torch.dtype | None = None,
    epilogue: Epilogue = Epilogue.NONE,
) -> Operation | None:
    """The operation of a product, apart from layout and grouping. Returns None if no kernel has it.

    FP32 operands make TF32 products, which only run while torch's own may (`allows_tf32`). A result
    that is added to is FP32, unless `output` says otherwise.

    Args:
        form: which product; it says the scaling, and whether the result is added to.
        a: element type of the left operand.
        b: element type of the right operand.
        output: element type of the result; by default torch's for such a product.
        epilogue: what the same kernel does with the product.
    """
    types = _TYPES.get((a, b))
    if types is None or (output is not None and output not in _OUTPUTS):
        return None
    out = None if output is None else _OUTPUTS[output]
    if output is None and (form is Form.ROW_SCALED or form.adds):
        out = Element.F32 if form.adds else Element.BF16
    scaling = _SCALINGS.get(form, Scaling.NONE)
    try:
        operation = Operation.of(
            types, out=out, scaling=scaling, epilogue=epilogue, accumulate=form.adds
        )
        return replace(operation, symmetric=form is Form.SYMMETRIC)
    except InvalidProblem:
        return None


SCALED_TYPES = frozenset(pair for pair in _TYPES if operation_of(Form.SCALED, *pair) is not None)
"""Element types of A and B in products that have a factor for each operand."""


class Spec(NamedTuple):
    """A tensor without its address and data."""

    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tensor.dtype, tensor.device, tensor.size(), tensor.stride())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size


class Matrix(NamedTuple):
    """An operand: `batch` matrices, with strides in elements."""

    batch: int
    rows: int
    columns: int
    batch_stride: int
    row_stride: int
    column_stride: int

    def transposed(self) -> Matrix:
        """Rows and columns exchanged."""
        return self._replace(
            rows=self.columns,
            columns=self.rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
        )

    def leading(self, *, row_major: bool) -> int | None:
        """The leading dimension in that order. Returns None if the memory has another order.

        The stride of an extent of 1 means nothing, so such an operand may suit both orders.
        """
        inner, outer, contiguous, leading = (
            (self.columns, self.rows, self.column_stride, self.row_stride)
            if row_major
            else (self.rows, self.columns, self.row_stride, self.column_stride)
        )
        if outer == 1:
            leading = inner
        return None if (contiguous != 1 and inner != 1) or leading < inner else leading

    def orders(self) -> tuple[tuple[bool, int], ...]:
        """(is row-major, leading dimension) of every order that it suits, long rows first.

        Rows of one element suit no vector load, so the other order comes first then.
        """
        orders = [
            (row_major, leading)
            for row_major in (True, False)
            if (leading := self.leading(row_major=row_major)) is not None
        ]
        return tuple(orders if self.columns > 1 else reversed(orders))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A product that kernels could run: the problem, and where its operands lie.

    Attributes:
        problem: what is computed.
        lda, ldb: leading dimensions, in elements.
        stride_a, stride_b, stride_d: from one batch entry or group to the next, in elements; 0 if
            the groups share the operand.
        output: size of the result, which is contiguous.
    """

    problem: Problem
    lda: int
    ldb: int
    stride_a: int
    stride_b: int
    stride_d: int
    output: tuple[int, ...]


def shapes(
    form: Form,
    a: Spec,
    b: Spec,
    output: torch.dtype | None = None,
    groups: int = 0,
    epilogue: Epilogue = Epilogue.NONE,
) -> tuple[Shape, ...]:
    """The ways in which kernels could run this product, the most natural layout first.

    `output` is the result's element type, by default torch's. `groups` is how many groups a grouped
    product has. `epilogue` is what the same kernel does with the product. Of a gated product `b` is
    the gate's weight; up's lies elsewhere with the same strides.
    """
    operation = operation_of(form, a.dtype, b.dtype, output, epilogue)
    if operation is None or a.device != b.device:
        return ()
    grouped, grouping = form.is_grouped, Grouping.NONE
    if grouped:
        grouping = Grouping.ROWS if len(b.size) == 3 else Grouping.DEPTH
    operands = _grouped_operands(a, b, groups) if grouped else _operands(form, a, b)
    if operands is None:
        return ()
    left, right, size = operands
    extents = (left.rows, right.columns, left.columns, left.batch)
    if left.columns != right.rows or not all(1 <= extent <= MAX_EXTENT for extent in extents):
        return ()
    m, n, k, batch = extents
    if epilogue.is_gated:
        n *= 2
    # B's natural order is the other one: long columns first.
    orders_b = [(not row, leading) for row, leading in right.transposed().orders()]
    ways = []
    for (row_a, lda), (row_b, ldb) in itertools.product(left.orders(), orders_b):
        layout = Layout(("t" if row_a else "n") + ("t" if row_b else "n"))
        try:
            laid = replace(operation, layout=layout, grouping=grouping)
            problem = Problem.of(laid, m, n, k, batch)
        except InvalidProblem:  # these types have no such layout
            continue
        ways.append(
            Shape(
                problem=problem,
                lda=lda,
                ldb=ldb,
                stride_a=left.batch_stride,
                stride_b=right.batch_stride,
                stride_d=0 if grouping is Grouping.ROWS else m * problem.columns,
                output=size,
            )
        )
    return tuple(ways)


def present_shapes(
    form: Form,
    a: Spec,
    b: Spec,
    output: torch.dtype | None = None,
    groups: int = 0,
    epilogue: Epilogue = Epilogue.NONE,
) -> tuple[Shape, ...]:
    """`shapes`, but no TF32 product while torch multiplies FP32 matrices in full precision."""
    if a.dtype is torch.float32 and not allows_tf32():
        return ()
    return shapes(form, a, b, output, groups, epilogue)


def _grouped_operands(
    a: Spec, b: Spec, groups: int
) -> tuple[Matrix, Matrix, tuple[int, ...]] | None:
    """As `_operands`. An operand that the groups share has a batch stride of 0."""
    by_rows = len(b.size) == 3
    if len(a.size) != 2 or len(b.size) not in (2, 3) or b.size[-1] % _GROUPED_COLUMNS:
        return None
    if by_rows and b.size[0] != groups:
        return None
    left, right = folded(a.size, a.stride), (batched if by_rows else folded)(b.size, b.stride)
    if left is None or right is None:
        return None
    size = (left.rows, right.columns)
    return (
        left._replace(batch=groups),
        right._replace(batch=groups),
        size if by_rows else (groups, *size),
    )


_GROUPED_COLUMNS = 8
"""torch begins every row of a grouped result on 16 bytes, and kernels write packed rows. Both agree
if N is a multiple of this; other products are torch's."""


def _operands(form: Form, a: Spec, b: Spec) -> tuple[Matrix, Matrix, tuple[int, ...]] | None:
    """A[M, K], B[K, N] and the size of the result."""
    left: Matrix | None
    right: Matrix | None
    if form in (Form.WEIGHT_GRADIENT, Form.ADDED_GRADIENT):
        if a.size[:-1] != b.size[:-1] or len(a.size) < 2:
            return None
        left, right = folded(a.size, a.stride), folded(b.size, b.stride)
        if left is None or right is None:
            return None
        return left.transposed(), right, (left.columns, right.columns)
    if len(a.size) < 2 or len(b.size) < 2:
        return None
    if len(b.size) == 2:
        left = folded(a.size, a.stride)
        right = folded(b.size, b.stride)
        if left is None or right is None:
            return None
        if form in (Form.LINEAR, Form.LINEAR_BIAS):
            right = right.transposed()
        return left, right, (*a.size[:-1], right.columns)
    if form not in (Form.MATMUL, Form.SYMMETRIC, Form.ADDED) or a.size[:-2] != b.size[:-2]:
        return None
    left, right = batched(a.size, a.stride), batched(b.size, b.stride)
    if left is None or right is None:
        return None
    return left, right, (*a.size[:-1], right.columns)


def folded(size: tuple[int, ...], stride: tuple[int, ...]) -> Matrix | None:
    """A tensor as one matrix of all its rows. Returns None if the rows are not evenly laid."""
    rows = _collapsed(size[:-1], stride[:-1])
    return rows and Matrix(1, rows[0], size[-1], 0, rows[1], stride[-1])


def batched(size: tuple[int, ...], stride: tuple[int, ...]) -> Matrix | None:
    """A tensor of three or more dimensions as a batch of matrices.

    Returns None if it is not evenly laid. A batch made by `expand` has stride 0: kernels take it.
    """
    batch = _collapsed(size[:-2], stride[:-2])
    if batch is None or batch[1] < 0:
        return None
    return Matrix(batch[0], size[-2], size[-1], batch[1], stride[-2], stride[-1])


def _collapsed(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, int] | None:
    """Extent and stride of dimensions joined as by `Tensor.view`. Returns None if it could not."""
    extent, step = 1, 1
    for length, distance in zip(reversed(size), reversed(stride), strict=True):
        if length == 1:
            continue
        if extent == 1:
            step = distance
        elif distance != extent * step:
            return None
        extent *= length
    return extent, step
