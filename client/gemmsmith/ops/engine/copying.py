"""Plans that copy operands, for rows that have the same bits at every M.

An operand that no kernel reads as it lies (every other column, an expanded gradient, rows off the
alignment) is copied without gaps. If no kernel of the order reads the copies either, or N or K is
no multiple of the alignment, A and B are copied in another layout and padded with zeros. So each
product costs its copies, and only what no winner's kernel takes in any layout cannot run.

Zeros after the end of K keep a row's bits. Kernels add zeros there themselves, up to whole tiles of
K, and the sum of an instruction does not depend on terms that are zero. This is assumed, and
`tests/gpu/test_invariant_programs.py` compares it. A sum starts at +0, so it never becomes -0.

A fused product reads A or a copy by rows. So whether a layer is fused depends on its weight, not on
where its input lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.nn import functional

from gemmsmith.core.operation import Epilogue
from gemmsmith.errors import NotInvariant
from gemmsmith.ops.engine.forms import Form, Matrix, Shape, Spec, batched, folded, shapes
from gemmsmith.ops.engine.numerics import in_order
from gemmsmith.ops.engine.operands import NO_OPERANDS, Operands
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.planning import Planner

ALIGNMENT = 16
"""Bytes: rows and matrices that begin at multiples suit the loads and stores of every kernel."""

_GRADIENTS = (Form.WEIGHT_GRADIENT, Form.ADDED_GRADIENT)


class CopyingPlan(Plan):
    """A plan for operands of which it copies some. It is called as other plans are."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Plan) -> None:
        self._inner = inner
        self.config, self.shape, self.epilogue = inner.config, inner.shape, inner.epilogue
        self.needs, self.has_failed = inner.needs, False
        self.saving_us, self.time_us = inner.saving_us, inner.time_us


class _Packed(CopyingPlan):
    """Copies A, B or both without gaps in the layout's order, and keeps everything else."""

    __slots__ = ("_copies_a", "_copies_b")

    def __init__(self, inner: Plan, *, copies_a: bool, copies_b: bool) -> None:
        super().__init__(inner)
        self._copies_a, self._copies_b = copies_a, copies_b

    def suits(self, operands: Operands) -> bool:
        return self._inner.suits(operands)

    def outputs(self) -> dict[str, torch.Tensor]:
        return self._inner.outputs()

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Operands = NO_OPERANDS
    ) -> torch.Tensor | None:
        layout = self.shape.problem.operation.layout
        if self._copies_b:
            b = _by_order(b, row_major=layout.b_row_major)
            if "up" in operands:
                operands = {
                    **operands,
                    "up": _by_order(operands["up"], row_major=layout.b_row_major),
                }
        if self._copies_a:
            a = _by_order(a, row_major=layout.a_row_major)
        return self._inner(a, b, operands)


class _Extents(NamedTuple):
    """What is multiplied: A[M, K] · B[K, N], or as many of these as `batch`; 0: no batch.

    Attributes:
        output: the result's size.
        left, right: where A and B lie. None if not evenly.
    """

    batch: int
    m: int
    n: int
    k: int
    output: tuple[int, ...]
    left: Matrix | None
    right: Matrix | None

    @classmethod
    def of(cls, form: Form, a: Spec, b: Spec) -> _Extents | None:
        """Returns None if the sizes do not fit."""
        if form.is_grouped or min(len(a.size), len(b.size)) < 2:
            return None
        left, right = folded(a.size, a.stride), folded(b.size, b.stride)
        if form in _GRADIENTS:
            m, n, k = a.size[-1], b.size[-1], prod(a.size[:-1])
            fits = a.size[:-1] == b.size[:-1]
            return cls(0, m, n, k, (m, n), left and left.transposed(), right) if fits else None
        is_linear = form in (Form.LINEAR, Form.LINEAR_BIAS)
        k, n = b.size[:-3:-1] if is_linear else b.size[-2:]
        if a.size[-1] != k:
            return None
        if len(b.size) == 2:
            right = right and right.transposed() if is_linear else right
            return cls(0, prod(a.size[:-1]), n, k, (*a.size[:-1], n), left, right)
        if is_linear or a.size[:-2] != b.size[:-2]:
            return None
        left, right = batched(a.size, a.stride), batched(b.size, b.stride)
        return cls(prod(a.size[:-2]), a.size[-2], n, k, (*a.size[:-1], n), left, right)


class _Way(NamedTuple):
    """A layout in which a kernel may read the operands, and their extents with zeros.

    Attributes:
        row_a, row_b: whether rows of A and of B are contiguous, else columns.
        keeps_a, keeps_b: whether the operand is read as it lies.
        m, n, k: the extents.
    """

    row_a: bool
    row_b: bool
    keeps_a: bool
    keeps_b: bool
    m: int
    n: int
    k: int


class _Laid(CopyingPlan):
    """Copies operands to another layout, with zeros, and cuts the zeros off the result."""

    __slots__ = ("_extents", "_form", "_way")

    def __init__(self, inner: Plan, form: Form, extents: _Extents, way: _Way) -> None:
        super().__init__(inner)
        self._form, self._extents, self._way = form, extents, way

    def suits(self, operands: Operands) -> bool:
        outputs = [operands[name] for name in ("c", "d") if name in operands]
        return all(
            tensor.shape == self._extents.output and tensor.dtype == self._inner.dtype
            for tensor in outputs
        )

    def outputs(self) -> dict[str, torch.Tensor]:
        return {}

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, operands: Operands = NO_OPERANDS
    ) -> torch.Tensor | None:
        way, (batch, m, n, k, output, *_) = self._way, self._extents
        several = (batch,) if batch else ()
        if not way.keeps_a:
            a = a.reshape(-1, m).mT if self._form in _GRADIENTS else a.reshape(*several, m, k)
            a = _laid(a, way.m, way.k, row_major=way.row_a)
        if not way.keeps_b:
            b = b.mT if self._form in (Form.LINEAR, Form.LINEAR_BIAS) else b.reshape(*several, k, n)
            b = _laid(b, way.k, way.n, row_major=way.row_b)
        into, added = operands.get("d"), operands.get("c")
        with_zeros = {name: tensor for name, tensor in operands.items() if name.startswith("scale")}
        for name, extent, size in (("scale_a", m, way.m), ("scale_b", n, way.n)):
            if name in with_zeros and with_zeros[name].numel() == extent != size:
                scale = with_zeros[name].reshape(-1)
                with_zeros[name] = functional.pad(scale, (0, size - extent))
        if self._form.adds and (added := into if added is None else added) is not None:
            added = added.reshape(*several, m, n)
            with_zeros["c"] = _laid(added, way.m, way.n, row_major=True)
        d = self._inner(a, b, with_zeros)
        if d is None:
            return None
        d = d[..., :m, :n].reshape(output)
        return d if into is None else into.copy_(d)


def planned(
    planner: Planner,
    form: Form,
    a: Spec,
    b: Spec,
    output: torch.dtype | None,
    groups: int,
    epilogue: Epilogue,
) -> tuple[Plan | None, bool]:
    """A plan in one order, with copies if they are needed, and whether that answer may be kept.

    The arguments are those of `Engine.plan`.
    """
    has_batch = len(b.size) > 2
    several = has_batch and not form.is_grouped
    packed_b = _packed(b, is_batch=has_batch)
    adds_bias = form is Form.LINEAR_BIAS and epilogue is Epilogue.NONE
    fused = Epilogue.BIAS if adds_bias else epilogue
    rows = _packed(a, is_batch=several, orders=(True,))
    if fused is not Epilogue.NONE:
        possible = [
            shape
            for shape in shapes(form, rows, packed_b, output, groups, fused)
            if shape.problem.operation.layout.a_row_major
        ]
        plan, keep = _with_copies(planner, form, possible, (a, rows), (b, packed_b))
        if plan is not None or not keep or epilogue is not Epilogue.NONE:
            return plan, keep
    pairs = [(a, b), (_packed(a, is_batch=several), packed_b)]
    if form.is_grouped:
        lefts, rights = (
            [_packed(of, is_batch=is_batch, orders=(order,)) for order in (True, False)]
            for of, is_batch in ((a, several), (b, has_batch))
        )
        pairs += itertools.product(lefts, rights)
    for left, right in dict.fromkeys(pairs):
        possible = [*shapes(form, left, right, output, groups)]
        plan, keep = _with_copies(planner, form, possible, (a, left), (b, right))
        if plan is not None or not keep:
            return plan, keep
    extents = _Extents.of(form, a, b)
    if extents is None:
        return None, True
    plain = form if form in _SCALED else Form.ADDED if form.adds else Form.MATMUL
    for way in _ways(extents, a.dtype.itemsize, b.dtype.itemsize):
        size = (extents.batch,) if extents.batch else ()
        left = _spec(a, (*size, way.m, way.k), way.row_a, extents.left if way.keeps_a else None)
        right = _spec(b, (*size, way.k, way.n), way.row_b, extents.right if way.keeps_b else None)
        ordered = in_order(plain, shapes(plain, left, right, output))
        plan, keep = planner.plan(ordered, plain, a)
        if plan is not None:
            return _Laid(plan, form, extents, way), keep
        if not keep:
            return None, False
    return None, True


def _with_copies(
    planner: Planner,
    form: Form,
    possible: Sequence[Shape],
    a: tuple[Spec, Spec],
    b: tuple[Spec, Spec],
) -> tuple[Plan | None, bool]:
    """A plan for operands that are copied if the second place of a pair is not the first."""
    plan, keep = planner.plan(in_order(form, possible), form, a[0])
    copies_a, copies_b = a[0] != a[1], b[0] != b[1]
    if plan is not None and (copies_a or copies_b):
        plan = _Packed(plan, copies_a=copies_a, copies_b=copies_b)
    return plan, keep


_SCALED = (Form.SCALED, Form.SCALED_PRECISE, Form.ROW_SCALED, Form.ROW_SCALED_PRECISE)


def _ways(extents: _Extents, bytes_a: int, bytes_b: int) -> Iterator[_Way]:
    """All layouts, the one with the fewest bytes to copy first."""
    step_a, step_b = ALIGNMENT // bytes_a, ALIGNMENT // bytes_b
    made: list[tuple[int, _Way]] = []
    for row_a, row_b in itertools.product((True, False), repeat=2):
        m = extents.m if row_a else _up(extents.m, step_a)
        n = _up(extents.n, step_b)
        k = extents.k if row_b and not row_a else _up(extents.k, max(step_a, step_b))
        is_whole = k == extents.k
        keeps_a = is_whole and m == extents.m and _is_read(extents.left, row_a, bytes_a)
        keeps_b = is_whole and n == extents.n and _is_read(extents.right, row_b, bytes_b)
        copied = (0 if keeps_a else m * k * bytes_a) + (0 if keeps_b else k * n * bytes_b)
        made.append((copied, _Way(row_a, row_b, keeps_a, keeps_b, m, n, k)))
    made.sort(key=lambda item: item[0])
    return (way for _, way in made)


def _is_read(matrix: Matrix | None, row_major: bool, element: int) -> bool:
    """Whether kernels read a matrix in that order as it lies."""
    leading = None if matrix is None else matrix.leading(row_major=row_major)
    if matrix is None or leading is None:
        return False
    return (leading * element) % ALIGNMENT == 0 == (matrix.batch_stride * element) % ALIGNMENT


def _spec(of: Spec, size: tuple[int, ...], row_major: bool, kept: Matrix | None) -> Spec:
    """Matrices in that order: as they lie if `kept` says so, else without gaps."""
    if kept is not None:
        strides = (kept.batch_stride, kept.row_stride, kept.column_stride)
        return Spec(of.dtype, of.device, torch.Size(size), strides[-len(size) :])
    *outer, rows, columns = size
    stride = [columns, 1] if row_major else [1, rows]
    step = rows * columns
    for extent in reversed(outer):
        stride.insert(0, step)
        step *= extent
    return Spec(of.dtype, of.device, torch.Size(size), tuple(stride))


def _laid(matrix: torch.Tensor, rows: int, columns: int, *, row_major: bool) -> torch.Tensor:
    """The matrix in that order, with zeros after its rows and columns."""
    size = (rows, columns) if row_major else (columns, rows)
    lines = matrix if row_major else matrix.mT
    missing = size[1] - lines.shape[-1], size[0] - lines.shape[-2]
    if any(missing):
        lines = functional.pad(lines, (0, missing[0], 0, missing[1]))
    lines = lines.contiguous()
    return lines if row_major else lines.mT


def _by_order(tensor: torch.Tensor, *, row_major: bool) -> torch.Tensor:
    return tensor.contiguous() if row_major else tensor.mT.contiguous().mT


def beside(operands: Operands, *, moves: bool = False) -> dict[str, torch.Tensor]:
    """What a kernel reads beside A and B, without gaps; but not `up`, which lies as B.

    `moves`: also at aligned addresses.
    """
    return {
        name: moved(tensor.contiguous()) if moves else tensor.contiguous()
        for name, tensor in operands.items()
        if name not in ("d", "up")
    }


def written(d: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`d` in the caller's output, which gets its size. Returns `d` without one.

    Raises:
        NotInvariant: it has another type.
    """
    if out is None:
        return d
    if out.dtype is not d.dtype:
        raise NotInvariant(f"numerics='invariant': the output is {out.dtype}, not {d.dtype}")
    if out.shape != d.shape:
        out.resize_(d.shape)
    return out.copy_(d)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an aligned address."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else copied(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as `packed`."""
    copy = packed(tensor)
    return copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps, in the same order if it has one."""
    if _is_turned(tensor.stride()):
        return tensor.mT.contiguous().mT
    return tensor.contiguous()


def _packed(of: Spec, *, is_batch: bool, orders: tuple[bool, ...] = (True, False)) -> Spec:
    """A copy of a tensor that no kernel reads in one of the orders; others as they are.

    An order is whether rows are contiguous, else columns.
    """
    if len(of.size) < 2:
        return of
    matrix = (batched if is_batch else folded)(of.size, of.stride)
    if any(_is_read(matrix, order, of.dtype.itemsize) for order in orders):
        return of
    by_rows = orders[0] if len(orders) == 1 else not _is_turned(of.stride)
    return _spec(of, of.size, by_rows, None)


def _is_turned(stride: tuple[int, ...]) -> bool:
    """Whether columns are contiguous, and rows are not."""
    return len(stride) > 1 and stride[-2] == 1 and stride[-1] != 1


def _up(extent: int, step: int) -> int:
    return -(-extent // step) * step
