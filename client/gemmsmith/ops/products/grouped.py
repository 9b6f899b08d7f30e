"""`gemmsmith.grouped_mm`: the products of a mixture of experts' layer, with their gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.ops.below import experts
from gemmsmith.ops.engine import functions, observers
from gemmsmith.ops.engine.by_triton import is_derived
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.products.registry import CallWay, register, wants_gradient

BEGIN = 16
"""Bytes: where rows of a grouped product's operands begin."""


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`: each expert's tokens times that expert's matrix.

    Rows of `a` after the last end belong to no expert. These rows of the result and of the gradient
    are not written. Under autocast both operands are cast, as in `gemmsmith.matmul`.

    Args:
        a: [T, K], tokens sorted by expert; or [M, T] with a `b` of two dimensions.
        b: [E, K, N], for weights [E, N, K] pass `weight.mT`: the result is [T, N]; or [T, N], and
            the result is [E, M, N], one product for each run of T.
        offs: [E] int32 on the device: the end of each expert's tokens, in ascending order.
        out_dtype: None, or the operands' type.

    Raises:
        RuntimeError, ValueError: raised by torch if sizes, types or strides do not match.
    """
    kind = a.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        a, b = a.to(dtype), b.to(dtype)
    if out_dtype not in (None, a.dtype) or a.dim() != 2 or b.dim() not in (2, 3):
        return torch._grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
    result: torch.Tensor = _grouped_mm(a, b, offs)
    return result


def _autograd(
    _way: CallWay, _engine: Engine | None, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    if not wants_gradient(a, b):
        return grouped_below(a, b, offs)
    if b.dim() == 2:  # no kernel takes the gradients' operands of three dimensions
        return torch._grouped_mm(a, b, offs=offs)
    d: torch.Tensor = GroupedMm.apply(a, b, offs)  # type: ignore[no-untyped-call]
    return d


def grouped_below(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product, by a kernel or by torch. Below autograd."""
    if observers.unobserved():
        return _run(a, b, offs)
    engine = functions.engine_here()
    if engine is None or (
        functions.sizes_are_numbers(a, b, offs)
        and engine.plan(Form.GROUPED, a, b, groups=offs.shape[0]) is None
    ):
        return torch._grouped_mm(a, b, offs=offs)  # a tracer sees torch's own
    with torch._C._AutoDispatchBelowAutograd():
        d: torch.Tensor = torch.ops.gemmsmith.grouped_mm(a, b, offs)
        return d


def _run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    engine = current()
    # While `patch` replaces torch's operator, that runs the same kernel and is counted once.
    is_here = observers.is_dense(a) and observers.is_dense(b)  # no batch of gradients
    if engine is not None and is_here and not experts.takes(a, b):
        d = experts.by_kernel(engine, a, b, offs)
        if d is not None:
            return d
    return torch._grouped_mm(a, b, offs=offs)


def derivable(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product by torch's operators, for any tensors. It has gradients of any order.

    Rows that belong to no expert hold zeros, in the result and in gradients.
    """
    by_depth = b.dim() == 2
    row = torch.arange(b.shape[0] if by_depth else a.shape[0], device=b.device)
    if forward_ad._current_level >= 0:  # torch's grouped product has no tangent
        bounds = pairwise([torch.zeros_like(ends[0]), *ends])
        masks = [(row >= first) & (row < last) for first, last in bounds]
        if by_depth:
            return torch.stack([a.where(mask, 0) @ b for mask in masks])
        parts = [a.where(mask[:, None], 0) @ of for mask, of in zip(masks, b, strict=True)]
        return torch.stack(parts).sum(dim=0)
    used = row < ends[-1:]
    if by_depth:
        return torch._grouped_mm(a.where(used, 0), b.where(used[:, None], 0), offs=ends)
    used = used[:, None]
    return torch._grouped_mm(a.where(used, 0), aligned(b), offs=ends).where(used, 0)


def aligned(weight: torch.Tensor) -> torch.Tensor:
    """Experts' weights, or a copy that grouped products can read."""
    if not observers.is_dense(weight) or is_aligned(weight):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def is_aligned(weight: torch.Tensor) -> bool:
    """Whether grouped products can read experts' weights, which are dense."""
    step = BEGIN // weight.element_size()
    (number, rows, columns), (between, *strides) = weight.shape, weight.stride()
    lies = (
        (strides[1] == 1 and strides[0] % step == 0 and strides[0] >= columns)
        or (strides[0] == 1 and strides[1] % step == 0 and strides[1] >= rows)
    ) and (number == 1 or (between > 0 and between % step == 0))
    return lies and weight.data_ptr() % BEGIN == 0


class GroupedMm(torch.autograd.Function):
    """`grouped_mm` of tokens and experts' weights, each of the three products by its own winner."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """`a · b`, by runs of rows."""
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offs)
        ctx.is_turned = b.stride(-2) == 1
        return grouped_below(a, b, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of a and b, that of b lying in memory as b does."""
        a, b, offs = ctx.saved_tensors
        # A gradient that was expanded, as a sum's, suits neither kernels nor torch.
        dy = observers.dense(grads[0]).contiguous()
        # torch's operator also takes a batch of gradients, and has gradients of gradients.
        multiply = torch._grouped_mm if is_derived(a, b, dy) else grouped_below
        da = db = None
        if ctx.needs_input_grad[0]:
            da = multiply(dy, b.mT, offs)
        if ctx.needs_input_grad[1]:
            db = multiply(dy.mT, a, offs).mT if ctx.is_turned else multiply(a.mT, dy, offs)
        return da, db, None


def _compute(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _run(a, b, offs).contiguous()


def _fake(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    size = (a.shape[0], b.shape[-1])
    return a.new_empty(size if b.dim() == 3 else (offs.shape[0], *size))


_grouped_mm = register(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor",
    _compute,
    _fake,
    _autograd,
    by_torch=torch._grouped_mm,
    needs_engine=True,
)
