"""`gemmsmith.linear`: a linear layer and what follows it, in one kernel where one wins.

Where the operation has a winner (`gemmsmith.core.epilogue`), that kernel runs; else torch's own
steps follow whatever computes the product. Which it is, is decided once for each size, with a
gradient wanted and without: then what the activation or a factor is applied to is stored for the
backward pass, whose products have winners of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, check_activation, through
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import operators
from gemmsmith.ops.products.registry import ours, register, wants_gradient
from gemmsmith.ops.products.telling import is_told, tell


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """`column_scale[N] * activation(row_scale[...] * (x[..., K] · weight[N, K]ᵀ) + bias[N])
    + residual[..., N]`.

    Without what follows the bias, and without factors, this is `torch.nn.functional.linear`. Under
    autocast, x, weight and bias are cast as by torch; a residual is added, and factors multiply, in
    their own type.

    Kernels have an activation, or a residual with or without `column_scale`, or `row_scale` alone,
    each with or without a bias (an activation with one). Of other combinations the first of these
    is fused, and torch's operators follow it.

    Args:
        x: any number of leading dimensions.
        weight: [N, K].
        bias: [N]; None adds nothing.
        activation: `gelu_tanh`, `gelu` (exact), `silu` or `relu2` (the square of ReLU); None: none.
            Fused kernels need a bias.
        residual: of the result's size, or broadcastable to it; None adds nothing.
        column_scale: [N], such as LayerScale's; of the result's type where a kernel is to read it.
            If its gradient is wanted, the kernel stores what it multiplies. None: 1.
        row_scale: [...], x's leading dimensions, usually FP32, such as an RMS norm's factors; the
            result has the product's type all the same. Its gradient needs the product, which no
            kernel stores: if it is wanted, torch's operators follow the product. None: 1.
        main_grad: [N, K], usually FP32: the weight's gradient is added to it in the backward pass,
            and `weight.grad` is not changed, as in Megatron's gradient accumulation.

    Raises:
        ValueError: there is no such activation; row_scale does not have x's leading dimensions;
            main_grad does not have the weight's shape or device, or requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if activation is not None:
        check_activation(activation)
    if row_scale is not None:
        if row_scale.shape != x.shape[:-1]:
            has, wants = tuple(row_scale.shape), tuple(x.shape[:-1])
            raise ValueError(f"row_scale must be of x's leading dimensions {wants}, got {has}")
        follows = (activation, column_scale, residual)
        if any(one is not None for one in follows):  # no kernel has it and one of these
            out = linear(x, weight, bias, row_scale=row_scale, main_grad=main_grad)
            return _after(out, *follows)
    elif residual is None:
        if column_scale is not None:  # kernels that have it add a residual
            return (
                linear(x, weight, bias, activation=activation, main_grad=main_grad) * column_scale
            )
        if activation is None:
            return operators.linear(x, weight, bias, main_grad=main_grad)
    elif activation is not None:  # no kernel has both
        out = linear(x, weight, bias, activation=activation, main_grad=main_grad)
        return _after(out, None, column_scale, residual)
    if is_told():
        _tell(x, weight, bias, residual, activation, column_scale, row_scale)
    operands = (x, weight, bias, residual, column_scale, row_scale, main_grad)
    if current() is None or not ours(*operands):
        return _composed(x, weight, bias, residual, activation, main_grad, column_scale, row_scale)
    if main_grad is not None:
        operators.check_main_grad(main_grad, weight)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.fused_linear(
            x, weight, bias, residual, activation, main_grad, column_scale, row_scale
        )
        return result
    call = _autocast if torch.is_autocast_enabled(x.device.type) else _autograd
    return call(x, weight, bias, residual, activation, main_grad, column_scale, row_scale)


def _tell(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    column_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
) -> None:
    wanted = wants_gradient(x, weight, bias, residual, column_scale)
    epilogue = _chosen(bias, residual, activation, column_scale, row_scale, wanted=wanted)
    if epilogue is not None:
        tell(x, weight, epilogue)


def _composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    main_grad: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
) -> torch.Tensor:
    """The product by whoever computes it, then torch's steps."""
    if row_scale is not None:
        return _rows_scaled(operators.linear(x, weight, main_grad=main_grad), row_scale, bias)
    out = operators.linear(x, weight, bias, main_grad=main_grad)
    return _after(out, activation, column_scale, residual)


def _rows_scaled(
    product: torch.Tensor, row_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product times its factors, plus bias: in their type, rounded to the product's."""
    out = product * row_scale.unsqueeze(-1)
    return (out if bias is None else out + bias).to(product.dtype)


def _after(
    out: torch.Tensor,
    activation: str | None,
    column_scale: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Torch's steps after a linear layer."""
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    if column_scale is not None:
        out = out * column_scale
    return out if residual is None else out + residual


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    engine = current()
    wanted = wants_gradient(x, weight, bias, residual, column_scale)
    epilogue = _chosen(bias, residual, activation, column_scale, row_scale, wanted=wanted)
    if epilogue is not None and engine is not None and functions.sizes_are_numbers(x, weight):
        plan = engine.plan(Form.LINEAR, x, weight, epilogue=epilogue)
        if plan is not None and plan.suits(bias, residual, column_scale, row_scale):
            if not wanted:
                return with_aux(x, weight, bias, residual, epilogue, column_scale, row_scale)[0]
            out: torch.Tensor = FusedLinear.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, residual, column_scale, row_scale, main_grad, epilogue
            )[0]
            return out
    return _composed(x, weight, bias, residual, activation, main_grad, column_scale, row_scale)


def _chosen(
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    column_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    *,
    wanted: bool,
) -> Epilogue | None:
    """The epilogue that stores what the gradients need, if any is `wanted`; None: there is none."""
    if wants_gradient(row_scale):
        return None
    aux = wants_gradient(column_scale) if activation is None else wanted
    return _epilogue(bias, residual, activation, column_scale, row_scale, aux=aux)


def _epilogue(
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    column_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    *,
    aux: bool,
) -> Epilogue | None:
    """What kernels call it; `aux`: what the activation or factors are applied to is wanted too."""
    return Epilogue.made_of(
        bias=bias is not None,
        activation=activation,
        residual=residual is not None,
        aux=aux,
        column_scale=column_scale is not None,
        row_scale=row_scale is not None,
    )


def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight, bias = (operators.cast(one, dtype) for one in (x, weight, bias))
    return _autograd(x, weight, bias, residual, activation, main_grad, column_scale, row_scale)


Outputs = tuple[torch.Tensor, torch.Tensor]
"""D, and aux; empty where the epilogue stores none."""


def with_aux(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: Epilogue,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> Outputs:
    """Both outputs, by a kernel or by torch. Below autograd."""
    if observers.unobserved() or observers.is_watched():
        return _computed(x, weight, bias, residual, epilogue, column_scale, row_scale)
    with torch._C._AutoDispatchBelowAutograd():
        found: Outputs = torch.ops.gemmsmith.fused_product(
            x, weight, bias, residual, epilogue.value, column_scale, row_scale
        )
        return found


def _computed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: str,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> Outputs:
    """The same, below tracers."""
    what, engine = Epilogue(epilogue), functions.engine_here()
    if engine is not None:
        found = engine.fused(
            *(Form.LINEAR, x, weight, what, bias, residual),
            column_scale=column_scale,
            row_scale=row_scale,
        )
        if found is not None:
            out, aux = found
            return out, x.new_empty(0) if aux is None else aux
    if row_scale is not None:
        return _rows_scaled(functional.linear(x, weight), row_scale, bias), x.new_empty(0)
    linear = functional.linear(x, weight, bias).contiguous()
    out = _after(linear, what.activation, column_scale, residual)
    return out, linear if what.stores_aux else x.new_empty(0)


class FusedLinear(torch.autograd.Function):
    """`linear` with an epilogue; gives aux too, so that gradients have gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        column_scale: torch.Tensor | None,
        row_scale: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        epilogue: Epilogue,
    ) -> Outputs:
        """D, and aux."""
        out, aux = with_aux(x, weight, bias, residual, epilogue, column_scale, row_scale)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        operands = (x if wants_weight else None, weight if wants_x or wants_weight else None)
        ctx.save_for_backward(*operands, column_scale, row_scale, aux)
        ctx.main_grad, ctx.activation = main_grad, epilogue.activation
        ctx.set_materialize_grads(False)
        return out, aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of all but factors of rows; that of weight into `main_grad`, if there is one."""
        dy: Any
        dy, dlinear = (None if grad is None else observers.dense(grad) for grad in grads)
        x, weight, column_scale, row_scale, aux = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual, wants_scale = ctx.needs_input_grad[:5]
        dx = dweight = dbias = dscale = None
        if dy is not None:
            part = dy if column_scale is None else dy * column_scale
            part = part if ctx.activation is None else through(ctx.activation, dy, aux)
            dlinear = part if dlinear is None else dlinear + part
            dscale = (dy * aux).reshape(-1, dy.shape[-1]).sum(0) if wants_scale else None
        if dlinear is not None:  # of what the bias is added to
            again = observers.only_torch_differentiates(dlinear)
            multiply = fallback.product if again else functions.product
            scaled = dlinear if row_scale is None else dlinear * row_scale.unsqueeze(-1)
            dp = scaled.to(dlinear.dtype)
            dx = multiply(Form.MATMUL, dp, weight) if wants_x else None
            if wants_weight and ctx.main_grad is not None:
                functions.accumulate(ctx.main_grad, dp, x)
            elif wants_weight:
                dweight = functions.weight_gradient(multiply, dp, x, weight)
            dbias = functions.column_sums(dlinear) if wants_bias else None
        return dx, dweight, dbias, dy if wants_residual else None, dscale, None, None, None


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - the gradient's affair
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    epilogue = _epilogue(bias, residual, activation, column_scale, row_scale, aux=False)
    if epilogue is None:
        out = _composed(x, weight, bias, residual, activation, None, column_scale, row_scale)
        return out.contiguous()
    return _computed(x, weight, bias, residual, epilogue, column_scale, row_scale)[0].contiguous()


def fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - does not change the shape
    residual: torch.Tensor | None = None,
    activation: str | None = None,  # noqa: ARG001 - likewise
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - likewise
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    """`linear`'s result without data."""
    size: tuple[Any, ...] = (*x.shape[:-1], weight.shape[0])
    if residual is None:
        return x.new_empty(size)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if column_scale is not None:
        dtype = torch.promote_types(dtype, column_scale.dtype)
    whole = torch.broadcast_shapes(size, residual.shape)  # type: ignore[no-untyped-call]
    return x.new_empty(whole, dtype=dtype)


def _fake_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,  # noqa: ARG001 - does not change the shape
    residual: torch.Tensor | None,  # noqa: ARG001 - likewise
    epilogue: str,
    column_scale: torch.Tensor | None = None,  # noqa: ARG001 - likewise
    row_scale: torch.Tensor | None = None,  # noqa: ARG001 - likewise
) -> Outputs:
    size = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(size), x.new_empty(size if Epilogue(epilogue).stores_aux else (0,))


register(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
    "str? activation=None, Tensor? main_grad=None, Tensor? column_scale=None, "
    "Tensor? row_scale=None) -> Tensor",
    _compute,
    fake,
    _autograd,
    _autocast,
)
register(
    "fused_product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str epilogue, "
    "Tensor? column_scale=None, Tensor? row_scale=None) -> (Tensor, Tensor)",
    _computed,
    _fake_product,
)
