"""Products below the operators, by kernels or by torch, and their gradients.

Everything here works in four situations:

- Eagerly on plain tensors the engine decides at once, past torch's dispatcher, which costs a Python
  operator more time than the launch.
- While a graph is traced, products without a tuned kernel become torch's own operators, which the
  compiler fuses as usual. The others become operators of `gemmsmith::`.
- Under a dispatch mode of the program or a transform of `torch.func`, torch's own operators run, so
  that the mode or transform sees them.
- While calls are recorded, operators of `gemmsmith::` run, so that the recorder sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.engine import fallback
from gemmsmith.ops.engine.by_triton import by_triton
from gemmsmith.ops.engine.copying import beside
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.observers import (
    dense,
    is_dense,
    is_watched,
    only_torch_differentiates,
    unobserved,
)
from gemmsmith.ops.engine.operands import Operands
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.engine.symmetric import multiplied


def engine_here() -> Engine | None:
    """The engine in use. Returns None if a mode or a transform must see torch's own operators."""
    return None if is_watched() else current()


Outputs = tuple[torch.Tensor, Operands]
"""D, and by name what else an epilogue writes."""


class Decided(NamedTuple):
    """A product and its epilogue that one kernel computes; see `decide`."""

    engine: Engine
    plan: Plan
    form: Form
    a: torch.Tensor
    b: torch.Tensor
    operands: Operands

    def run(self) -> Outputs | None:
        """Returns None where torch must compute them after all."""
        engine, plan, form, a, b, operands = self
        outputs = plan.outputs()
        d = engine.run(plan, form, a, b, {**operands, **outputs})
        return None if d is None else (d, outputs)


def decide(
    engine: Engine | None,
    form: Form,
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue,
    operands: Operands,
    output: torch.dtype | None = None,
) -> Decided | None:
    """A product and its epilogue, if one kernel computes them. Returns None if torch must.

    Args:
        engine: decides. None: torch computes everything.
        form: which product.
        a: left operand.
        b: right operand.
        epilogue: what follows the product.
        operands: what the epilogue reads.
        output: element type of D; by default torch's for such a product.
    """
    if engine is None:
        return None
    up = operands.get("up")
    if up is not None and not lie_alike(b, up):
        return None
    plan = engine.plan(form, a, b, output, epilogue=epilogue)
    if plan is None:
        return None
    if engine.is_invariant and not plan.suits(operands):
        operands = {**operands, **beside(operands)}  # the kernel runs wherever they lie
    return Decided(engine, plan, form, a, b, operands) if plan.suits(operands) else None


def lie_alike(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether a gated kernel can read both weights: it has one set of strides for them."""
    layout = (up.stride(), up.size(), up.dtype, up.device)
    return (gate.stride(), gate.size(), gate.dtype, gate.device) == layout


def is_reported(engine: Engine | None) -> bool:
    """Whether a report counts every product, also torch's and those of gradients."""
    return engine is not None and engine.watcher is not None and unobserved()


def sizes_are_numbers(*tensors: torch.Tensor | None) -> bool:
    """Whether no size or stride is a tracer's symbol: without a tracer there are no symbols."""
    return unobserved() or has_numbers(*tensors)


def has_numbers(*tensors: torch.Tensor | None) -> bool:
    """Whether no size or stride is a symbol, also of tensors in a graph."""
    return all(
        type(extent) is int
        for tensor in tensors
        if tensor is not None
        for extent in (*tensor.size(), *tensor.stride())
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
        d = multiplied(engine, form, a, b) if engine is not None else None
        return fallback.product(form, a, b) if d is None else d
    if is_watched() or torch_computes(form, a, b):
        return fallback.product(form, a, b)
    operators = torch.ops.gemmsmith
    with torch._C._AutoDispatchBelowAutograd():
        match form:
            case Form.WEIGHT_GRADIENT:
                result: torch.Tensor = operators.weight_gradient(a, b)
            case Form.LINEAR:
                result = operators.linear(a, b)
            case _:
                result = operators.matmul(a, b)
        return result


def weight_gradient(
    multiply: Callable[..., torch.Tensor], dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """`dyᵀ · x`, by `product` or torch's, in the weight's layout: autograd copies others."""
    if weight.stride(-1) == 1:
        return multiply(Form.WEIGHT_GRADIENT, dy, x)
    return multiply(Form.WEIGHT_GRADIENT, x, dy).t()


def linear_below(
    engine: Engine | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan | None,
) -> torch.Tensor:
    """`x · weightᵀ + bias`, by its plan of the engine or by torch. Below autograd."""
    if unobserved():
        return run_linear(engine, x, weight, bias, plan)
    form = Form.LINEAR if bias is None else Form.LINEAR_BIAS
    if is_watched() or torch_computes(form, x, weight):
        return functional.linear(x, weight, bias)
    with torch._C._AutoDispatchBelowAutograd():
        d: torch.Tensor = torch.ops.gemmsmith.linear(x, weight, bias)
        return d


def run_linear(
    engine: Engine | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan | None,
) -> torch.Tensor:
    """The same, unobserved: the kernel adds the bias itself, or a pass follows that does."""
    d = None
    if engine is None:
        pass
    elif bias is None:
        d = engine.run(plan, Form.LINEAR, x, weight)
    elif plan is None or not plan.epilogue.has_bias:
        d = engine.run(plan, Form.LINEAR_BIAS, x, weight)
        d = None if d is None else d.add_(bias)
    else:
        # A bias of another type, or with gaps, is torch's, unless one order of sums is demanded.
        operands = {"bias": bias.contiguous() if engine.is_invariant else bias}
        fitting = plan if plan.suits(operands) else None
        d = engine.run(fitting, Form.LINEAR_BIAS, x, weight, operands)
    return functional.linear(x, weight, bias) if d is None else d


def accumulate(into: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """`into += dyᵀ · x`, in place: by a kernel that adds in FP32, or by torch."""
    if unobserved() or is_watched():
        accumulate_below(into, dy, x)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.gemmsmith.accumulate(into, dy, x)


def accumulate_below(into: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """The same on a device: below autograd and tracers."""
    engine = engine_here() if is_dense(dy) else None
    if engine is None or (
        engine.product(Form.ADDED_GRADIENT, dy, x, {"d": into}, into.dtype) is None
    ):
        fallback.accumulate(into, dy, x)


LEAST_SUMMED = 2**22
"""Least number of elements whose columns our kernels add up (8 MB of bf16). Not measured yet."""
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


def column_sums(dy: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias: the sum of dy[..., N] over all but the last dimension, in its type.

    On a GPU, two kernels of ours add up a large one, in the same order at every run.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    if rows.numel() >= LEAST_SUMMED and rows.stride(1) == 1 and rows.dtype in _SUMMED:
        return sums_of_columns(rows)
    return rows.sum(0)


@by_triton("gemmsmith.ops.engine.triton_sums")
def sums_of_columns(rows: torch.Tensor) -> torch.Tensor:
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
        return linear_below(current(), x, weight, bias, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, weight and bias; that of weight is added to `main_grad`, if it is set."""
        dy = dense(grads[0])
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        multiply = fallback.product if only_torch_differentiates(dy) else product
        dx = multiply(Form.MATMUL, dy, weight) if needs_x else None
        dweight = None
        if needs_weight and ctx.main_grad is not None:
            accumulate(ctx.main_grad, dy, x)
        elif needs_weight:
            dweight = multiply(Form.WEIGHT_GRADIENT, dy, x)
        dbias = column_sums(dy) if needs_bias else None
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

    If no product of a layer has one, torch's own operator and gradient cost the host least.
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
    """A packed tensor of that size, which a gradient most likely is."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return Spec(like.dtype, like.device, torch.Size(size), tuple(reversed(stride)))
