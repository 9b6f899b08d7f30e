"""`gemmsmith.linear`: a linear layer with its activation or residual, in one kernel where one wins.

Where the operation has a winner (`gemmsmith.epilogue`), that kernel runs; else torch's own
activation and sum follow whatever computes the product. Which it is, is decided once for each size,
with a gradient wanted and without: then what the activation is applied to is stored for the
backward pass, whose products have winners of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from gemmsmith.activations import ACTIVATIONS, check_activation, through
from gemmsmith.epilogue import Epilogue
from gemmsmith.ops.engine import fallback, functions
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import operators
from gemmsmith.ops.products.registry import all_ours, register, wants_gradient


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """`activation(x[..., K] · weight[N, K]ᵀ + bias[N]) + residual[..., N]`.

    Without activation and residual this is `torch.nn.functional.linear`. Under autocast, x, weight
    and bias are cast as by torch; a residual is added in its own type.

    Args:
        x: any number of leading dimensions.
        weight: [N, K].
        bias: [N]; None adds nothing.
        activation: `gelu_tanh`, `gelu` (exact), `silu` or `relu2` (the square of ReLU); None: none.
            Fused kernels need a bias.
        residual: of the result's size, or broadcastable to it; None adds nothing.
        main_grad: [N, K], usually FP32: the weight's gradient is added to it in the backward pass,
            and `weight.grad` is not changed, as in Megatron's gradient accumulation.

    Raises:
        ValueError: there is no such activation; main_grad does not have the weight's shape or
            device, or requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if activation is not None:
        check_activation(activation)
    if activation is None and residual is None:
        return operators.linear(x, weight, bias, main_grad=main_grad)
    if activation is not None and residual is not None:  # no kernel has both
        return linear(x, weight, bias, activation=activation, main_grad=main_grad) + residual
    if _listeners:
        _tell(x, weight, bias, residual, activation)
    given = [one for one in (bias, residual) if one is not None]
    if current() is None or not all_ours(x, weight, *given):
        return _composed(x, weight, bias, residual, activation, main_grad)
    if main_grad is not None:
        operators.check_main_grad(main_grad, weight)
    if torch.compiler.is_compiling() or not functions.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.fused_linear(
            x, weight, bias, residual, activation, main_grad
        )
        return result
    if torch.is_autocast_enabled(x.device.type):
        return _autocast(x, weight, bias, residual, activation, main_grad)
    return _autograd(x, weight, bias, residual, activation, main_grad)


Listener = Callable[[torch.Tensor, torch.Tensor, Epilogue], None]
"""Is told of x, weight and what could follow their product in one kernel; of backward epilogues dY
stands for x, without its data."""

_listeners: list[Listener] = []


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Tell of every call of `linear` that a fused kernel could answer, until the block's end."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
) -> None:
    wanted = wants_gradient(x, weight, bias, residual)
    epilogue = _epilogue(bias, residual, activation, aux=wanted)
    if epilogue is not None:
        tell(x, weight, epilogue)


def is_told() -> bool:
    """Whether somebody listens."""
    return bool(_listeners)


def tell(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> None:
    """Tell every listener, in the types that autocast gives; of a gate, its own rows."""
    kind = x.device.type  # which may be `meta`
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = operators.cast(x, dtype), operators.cast(weight, dtype)
    for listener in _listeners:
        listener(x, weight, epilogue)


def _composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    main_grad: torch.Tensor | None,
) -> torch.Tensor:
    """The product by whoever computes it, then torch's steps."""
    out = operators.linear(x, weight, bias, main_grad=main_grad)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else out + residual


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    engine = current()
    wanted = wants_gradient(x, weight, bias, residual)
    epilogue = _epilogue(bias, residual, activation, aux=wanted)
    if epilogue is not None and engine is not None and functions.sizes_are_numbers(x, weight):
        plan = engine.plan(Form.LINEAR, x, weight, epilogue=epilogue)
        if plan is not None and plan.suits(bias, residual):
            if not wanted:
                return with_aux(x, weight, bias, residual, epilogue)[0]
            out: torch.Tensor = FusedLinear.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, residual, main_grad, epilogue
            )
            return out
    return _composed(x, weight, bias, residual, activation, main_grad)


def _epilogue(
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    *,
    aux: bool,
) -> Epilogue | None:
    """What kernels call it; `aux`: what the activation is applied to is wanted too."""
    return Epilogue.made_of(
        bias=bias is not None,
        activation=activation,
        residual=residual is not None,
        aux=aux and activation is not None,
    )


def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight, bias = (operators.cast(one, dtype) for one in (x, weight, bias))
    return _autograd(x, weight, bias, residual, activation, main_grad)


Outputs = tuple[torch.Tensor, torch.Tensor]
"""D, and aux; empty where the epilogue stores none."""


def with_aux(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: Epilogue,
) -> Outputs:
    """Both outputs, by a kernel or by torch. Below autograd."""
    if functions.unobserved():
        return _computed(x, weight, bias, residual, epilogue)
    with torch._C._AutoDispatchBelowAutograd():
        found: Outputs = torch.ops.gemmsmith.fused_product(
            x, weight, bias, residual, epilogue.value
        )
        return found


def _computed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    epilogue: str,
) -> Outputs:
    """The same, below tracers."""
    what, engine = Epilogue(epilogue), current()
    if engine is not None:
        found = engine.fused(Form.LINEAR, x, weight, what, bias, residual)
        if found is not None:
            out, aux = found
            return out, x.new_empty(0) if aux is None else aux
    linear = functional.linear(x, weight, bias).contiguous()
    if residual is not None:
        return linear + residual, x.new_empty(0)
    assert what.activation is not None  # noqa: S101 - what is neither is `operators.linear`'s
    return ACTIVATIONS[what.activation](linear), linear if what.stores_aux else x.new_empty(0)


class FusedLinear(torch.autograd.Function):
    """`linear` with an epilogue; its gradients by torch's pointwise kernels and two products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        main_grad: torch.Tensor | None,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        """D."""
        out, aux = with_aux(x, weight, bias, residual, epilogue)
        ctx.save_for_backward(x, weight, bias, aux)
        ctx.main_grad, ctx.activation = main_grad, epilogue.activation
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, weight (into `main_grad`, if there is one), bias and residual."""
        (dy,) = grads
        x, weight, bias, aux = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
        again = torch.is_grad_enabled()  # a graph of the backward pass itself is asked for
        multiply = fallback.product if again else functions.product
        dp = dy
        if ctx.activation is not None:
            dp = through(ctx.activation, dy, functional.linear(x, weight, bias) if again else aux)
        dx = multiply(Form.MATMUL, dp, weight) if wants_x else None
        dweight = None
        if wants_weight and ctx.main_grad is not None:
            functions.accumulate(ctx.main_grad, dp, x)
        elif wants_weight:
            dweight = functions.weight_gradient(multiply, dp, x, weight)
        dbias = dp.reshape(-1, dp.shape[-1]).sum(0) if wants_bias else None
        return dx, dweight, dbias, dy if wants_residual else None, None, None


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - the gradient's affair
) -> torch.Tensor:
    epilogue = _epilogue(bias, residual, activation, aux=False)
    if epilogue is None:
        return _composed(x, weight, bias, residual, activation, None).contiguous()
    return _computed(x, weight, bias, residual, epilogue)[0].contiguous()


def fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001 - does not change the shape
    residual: torch.Tensor | None = None,
    activation: str | None = None,  # noqa: ARG001 - likewise
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    """`linear`'s result without data."""
    size: tuple[Any, ...] = (*x.shape[:-1], weight.shape[0])
    if residual is None:
        return x.new_empty(size)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    whole = torch.broadcast_shapes(size, residual.shape)  # type: ignore[no-untyped-call]
    return x.new_empty(whole, dtype=dtype)


def _fake_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,  # noqa: ARG001 - does not change the shape
    residual: torch.Tensor | None,  # noqa: ARG001 - likewise
    epilogue: str,
) -> Outputs:
    size = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(size), x.new_empty(size if Epilogue(epilogue).stores_aux else (0,))


register(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
    "str? activation=None, Tensor? main_grad=None) -> Tensor",
    _compute,
    fake,
    _autograd,
    _autocast,
)
register(
    "fused_product(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str epilogue) "
    "-> (Tensor, Tensor)",
    _computed,
    _fake_product,
)
