"""Products below the operators: who computes one now, and their gradients.

Everything here works in three situations. *Eagerly* on plain tensors the engine is asked at once,
past torch's dispatcher, which costs a Python operator more than the launch does. While a graph is
*traced*, what has no tuned kernel becomes torch's own operators, so that the compiler fuses them
as ever, and the rest an operator of `gemmsmith::`. Under a dispatch mode of the program or a
transform of `torch.func`, torch's own operators run, so that the mode or transform sees them.
While calls are recorded, ours are called as torch's dispatcher calls them, so that they are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.ops.engine import fallback
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.by_triton import by_triton
from gemmsmith.ops.engine.engine import Engine, current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.observers import (
    dense,
    is_dense,
    is_watched,
    only_torch_differentiates,
    unobserved,
)
from gemmsmith.ops.engine.plan import Plan


def engine_here() -> Engine | None:
    """The engine in use; None if a mode or a transform must see torch's own operators."""
    return None if is_watched() else current()


def is_reported(engine: Engine | None) -> bool:
    """Whether a report counts every product, torch's and those of its gradients too."""
    return engine is not None and engine.watcher is not None and unobserved()


def sizes_are_numbers(*tensors: torch.Tensor) -> bool:
    """Whether no size or stride is a tracer's symbol."""
    return unobserved() or all(
        type(extent) is int for t in tensors for extent in (*t.size(), *t.stride())
    )


def torch_computes(form: Form, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a traced product is known to have no tuned kernel."""
    engine = current()
    if engine is None:
        return True
    return sizes_are_numbers(a, b) and engine.plan(form, a, b) is None


def product(form: Form, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product without bias, by a kernel or by torch. Below autograd."""
    if unobserved():
        engine = current()
        found = engine.product(form, a, b) if engine is not None else None
        return fallback.product(form, a, b) if found is None else found
    if is_watched() or torch_computes(form, a, b):
        return fallback.product(form, a, b)
    operators = torch.ops.gemmsmith
    with torch._C._AutoDispatchBelowAutograd():
        match form:
            case Form.WEIGHT_GRADIENT:
                out: torch.Tensor = operators.weight_gradient(a, b)
            case Form.LINEAR:
                out = operators.linear(a, b)
            case _:
                out = operators.matmul(a, b)
        return out


def weight_gradient(
    multiply: Callable[..., torch.Tensor], dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """`dyᵀ · x`, by `product` or torch's; laid out as the weight: autograd copies none then."""
    if weight.stride(-1) == 1:
        return multiply(Form.WEIGHT_GRADIENT, dy, x)
    return multiply(Form.WEIGHT_GRADIENT, x, dy).t()


def linear_below(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan | None
) -> torch.Tensor:
    """`x · weightᵀ + bias`, by `plan` where it is this product's. Below autograd."""
    form = Form.LINEAR if bias is None else Form.LINEAR_BIAS
    engine = current()
    if unobserved():
        out = None if engine is None else linear_by_kernel(engine, plan, x, weight, bias)
        return functional.linear(x, weight, bias) if out is None else out
    if is_watched() or torch_computes(form, x, weight):
        return functional.linear(x, weight, bias)
    with torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = torch.ops.gemmsmith.linear(x, weight, bias)
        return result


def linear_by_kernel(
    engine: Engine,
    plan: Plan | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """The same by a kernel, which adds the bias itself or is followed by a pass that does."""
    if bias is None:
        return engine.run(plan, Form.LINEAR, x, weight)
    if plan is None or not plan.adds_bias:
        out = engine.run(plan, Form.LINEAR_BIAS, x, weight)
        return None if out is None else out.add_(bias)
    # A bias of another type, or with gaps, is torch's.
    fitting = plan if plan.suits(bias, None) else None
    return engine.run(fitting, Form.LINEAR_BIAS, x, weight, beside=Beside(bias))


def accumulate(into: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """`into += dyᵀ · x`, in place: by a kernel that adds in FP32, or by torch."""
    if unobserved() or is_watched():
        accumulate_below(into, dy, x)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.gemmsmith.accumulate(into, dy, x)


def accumulate_below(into: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """The same, below autograd and tracers."""
    engine = engine_here() if is_dense(dy) else None
    if engine is None or engine.written(Form.ADDED_GRADIENT, dy, x, into.dtype, into=into) is None:
        fallback.accumulate(into, dy, x)


LEAST_SUMMED = 2**22
"""Elements from which sums of columns are our kernels' (8 MB of bf16). Not measured yet."""
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


def column_sums(dy: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias: the sum of dy[..., N] over all but the last dimension, in its type.

    A large one on a GPU is two kernels of ours, the same at every run.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    if rows.numel() >= LEAST_SUMMED and rows.stride(1) == 1 and rows.dtype in _SUMMED:
        return sums_of_columns(rows)
    return rows.sum(0)


@by_triton("gemmsmith.ops.engine.triton_sums")
def sums_of_columns(rows: torch.Tensor) -> torch.Tensor:
    """The sums of rows[R, N], in its type."""
    return rows.sum(0)


class Linear(torch.autograd.Function):
    """`linear` with each of its three products by its own winner."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        plan: Plan | None,
    ) -> torch.Tensor:
        """`x · weightᵀ + bias`."""
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.main_grad = main_grad
        return linear_below(x, weight, bias, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, weight and bias; that of weight into `main_grad`, if there is one."""
        dy = dense(grads[0])
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        multiply = fallback.product if only_torch_differentiates(dy) else product
        dx = multiply(Form.MATMUL, dy, weight) if wants_x else None
        dweight = None
        if wants_weight and ctx.main_grad is not None:
            accumulate(ctx.main_grad, dy, x)
        elif wants_weight:
            dweight = multiply(Form.WEIGHT_GRADIENT, dy, x)
        dbias = column_sums(dy) if wants_bias else None
        return dx, dweight, dbias, None, None


class Matmul(torch.autograd.Function):
    """`matmul` of one matrix on the right, or of two equal batches."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`a · b`."""
        needs_a, needs_b = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.is_flat = b.dim() == 2
        return product(Form.MATMUL, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of a and b."""
        dy = dense(grads[0])
        a, b = ctx.saved_tensors
        multiply = fallback.product if only_torch_differentiates(dy) else product
        da = db = None
        if ctx.needs_input_grad[0]:
            da = multiply(Form.LINEAR, dy, b) if ctx.is_flat else multiply(Form.MATMUL, dy, b.mT)
        if ctx.needs_input_grad[1] and ctx.is_flat:
            db = multiply(Form.WEIGHT_GRADIENT, a, dy)
        elif ctx.needs_input_grad[1]:
            db = multiply(Form.MATMUL, a.mT, dy)
        return da, db


def gradients_have_kernel(engine: Engine, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether one of a linear layer's two backward products has a tuned kernel.

    If none has, nor the forward one, torch's own operator and gradient are the cheapest to call.
    """
    if x.dim() < 2 or weight.dim() != 2:
        return False
    dy = contiguous(x, (*x.shape[:-1], weight.shape[0]))
    return (
        engine.plan(Form.MATMUL, dy, weight) is not None
        or engine.plan(Form.WEIGHT_GRADIENT, dy, x) is not None
    )


def matmul_has_kernel(engine: Engine, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the product or one of its gradients has a tuned kernel."""
    if not sizes_are_numbers(a, b) or engine.plan(Form.MATMUL, a, b) is not None:
        return True
    dy = contiguous(a, (*a.shape[:-1], b.shape[-1]))
    if b.dim() == 2:
        return (
            engine.plan(Form.LINEAR, dy, b) is not None
            or engine.plan(Form.WEIGHT_GRADIENT, a, dy) is not None
        )
    return (
        engine.plan(Form.MATMUL, dy, b.mT) is not None
        or engine.plan(Form.MATMUL, a.mT, dy) is not None
    )


def contiguous(like: torch.Tensor | Spec, size: tuple[int, ...]) -> Spec:
    """What a gradient of that size most likely is."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return Spec(like.dtype, like.device, torch.Size(size), tuple(reversed(stride)))
