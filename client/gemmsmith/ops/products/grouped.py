"""`gemmsmith.grouped_mm`: the products of a mixture of experts' layer, with their gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.autograd import forward_ad

from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.below import experts
from gemmsmith.ops.engine import functions, observers
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.by_triton import is_derived
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.products.registry import ours, register, wants_gradient

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

    Rows of `a` after the last end belong to no expert. These rows of the result are not written,
    and neither are those of the gradient. Under autocast both operands are cast, as in
    `gemmsmith.matmul`.

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
    plain = ours(a, b) and out_dtype in (None, a.dtype) and a.dim() == 2 and b.dim() in (2, 3)
    if current() is None or not plain:
        return torch._grouped_mm(a, b, offs=offs, out_dtype=out_dtype)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.grouped_mm(a, b, offs)
        return result
    return _autograd(a, b, offs)


def _autograd(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    if not wants_gradient(a, b):
        return grouped_below(a, b, offs)
    if b.dim() == 2:  # whose gradients have three dimensions on one side: no kernel is for them
        return torch._grouped_mm(a, b, offs=offs)
    out: torch.Tensor = GroupedMm.apply(a, b, offs)  # type: ignore[no-untyped-call]
    return out


def grouped_below(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The product, by a kernel or by torch. Below autograd."""
    if observers.unobserved():
        return _computed(a, b, offs)
    engine = functions.engine_here()
    if engine is None or (
        functions.sizes_are_numbers(a, b, offs)
        and engine.plan(Form.GROUPED, a, b, groups=offs.shape[0]) is None
    ):
        return torch._grouped_mm(a, b, offs=offs)  # a tracer sees torch's own
    with torch._C._AutoDispatchBelowAutograd():
        out: torch.Tensor = torch.ops.gemmsmith.grouped_mm(a, b, offs)
        return out


def _computed(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The same, below tracers."""
    engine = current()
    # Torch's own comes to the same kernel where a block of `patch` is open, and is told of once.
    if engine is not None and not experts.takes(a, b):
        out = experts.by_kernel(engine, a, b, offs)
        if out is not None:
            return out
    return torch._grouped_mm(a, b, offs=offs)


def derivable(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product by torch's operators, of any tensors and any number of times differentiable.

    Rows that are no expert's hold zeros, in its result and in gradients.
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
    """Experts' weights as grouped products take them; a copy where they lie otherwise."""
    if not observers.is_dense(weight):
        return weight
    step = BEGIN // weight.element_size()
    (number, rows, columns), (between, *strides) = weight.shape, weight.stride()
    lies = (
        (strides[1] == 1 and strides[0] % step == 0 and strides[0] >= columns)
        or (strides[0] == 1 and strides[1] % step == 0 and strides[1] >= rows)
    ) and (number == 1 or (between > 0 and between % step == 0))
    if lies and weight.data_ptr() % BEGIN == 0:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


PASS_BYTES_PER_US = 4.8e6
"""Device memory moved in a microsecond by the pass that a gated kernel saves, at most."""


def gated_plan(rows: Spec, gate_up: torch.Tensor, gate: torch.Tensor, *, keep: bool) -> Plan | None:
    """How a layer of experts is opened by one kernel; None where a product and a pass do it.

    A gated kernel has won over torch's product and a pass. Where a kernel of the product alone has
    won as well, the pass must be worth the difference: never slower.

    Args:
        rows: [R, K], tokens sorted by expert.
        gate_up: [E, K, 2 * I].
        gate: [E, K, I], its first half.
        keep: whether gate and up are stored as well.
    """
    engine, groups = current(), gate.shape[0]
    if engine is None or not observers.unobserved():
        return None
    plan = engine.plan(Form.GROUPED, rows, gate, groups=groups, epilogue=gate_epilogue(keep=keep))
    product = None if plan is None else engine.plan(Form.GROUPED, rows, gate_up, groups=groups)
    if plan is None or product is None:
        return plan
    if plan.time_us is None or product.time_us is None:
        return None
    problem = plan.shape.problem
    moved = 3 * problem.m * problem.columns * problem.operation.d.bytes
    return plan if plan.time_us <= product.time_us + moved / PASS_BYTES_PER_US else None


def gate_epilogue(*, keep: bool) -> Epilogue:
    """SwiGLU, of a layer of experts."""
    return Epilogue.SILU_GATE_AUX if keep else Epilogue.SILU_GATE


def gated_by(
    plan: Plan,
    rows: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: torch.Tensor,
    offs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`factors[R] * silu(gate) * up`, [R, I], and gate and up, [R, 2 * I], which is empty where the
    plan does not store them; None where the kernel does not take these very operands.
    """
    engine = current()
    if engine is None:
        return None
    stores = plan.shape.problem.operation.epilogue.stores_aux
    opened = plan.empty_aux() if stores else rows.new_empty(0)
    beside = Beside(aux=opened if stores else None, up=up, row_scale=factors)
    out = engine.run(plan, Form.GROUPED, rows, gate, offs=offs, beside=beside)
    return None if out is None else (out, opened)


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
        # Of a gradient that is derived again, or of a batch of them, torch's operator knows how.
        multiply = torch._grouped_mm if is_derived(a, b, dy) else grouped_below
        da = db = None
        if ctx.needs_input_grad[0]:
            da = multiply(dy, b.mT, offs)
        if ctx.needs_input_grad[1]:
            db = multiply(dy.mT, a, offs).mT if ctx.is_turned else multiply(a.mT, dy, offs)
        return da, db, None


def _compute(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _computed(a, b, offs).contiguous()


def _fake(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    size = (a.shape[0], b.shape[-1])
    return a.new_empty(size if b.dim() == 3 else (offs.shape[0], *size))


register("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", _compute, _fake, _autograd)
