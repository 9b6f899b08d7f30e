"""MLPs whose backward pass takes the activation's gradient within the product before it.

A layer alone cannot: the gradient of its activation needs the next layer's input gradient, and one
kernel computes both only where the two layers are known together. `mlp` is those two as one
autograd function, where the backward product with an epilogue (`gemmsmith.epilogue`) has a winner
for these sizes; else it is composed of layers, as anyone would write it. So is `gated_mlp`
(`gated_backward`).

Kept for the backward pass are x, what the activation is applied to and the activation's value,
which is what torch keeps. With `recompute` the value is not kept either, and the backward product
gives it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.activations import ACTIVATIONS, check_activation, through
from gemmsmith.epilogue import Epilogue
from gemmsmith.ops import backward, fallback, functions, fused, operators
from gemmsmith.ops.engine import current
from gemmsmith.ops.forms import Form
from gemmsmith.ops.registry import all_ours, register, wants_gradient


def mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    *,
    recompute: bool = False,
) -> torch.Tensor:
    """`activation(x[..., K] · w1[I, K]ᵀ + b1[I]) · w2[N, I]ᵀ + b2[N]`.

    Under autocast all are cast, as torch's layers do.

    Args:
        x: any number of leading dimensions.
        w1: [I, K].
        b1: [I]; None adds nothing.
        w2: [N, I].
        b2: [N]; None adds nothing.
        activation: `gelu_tanh`, `gelu`, `silu` or `relu2`.
        recompute: keep less for the backward pass, which computes the activation again.

    Raises:
        ValueError: there is no such activation.
        RuntimeError: torch's, where the sizes or types do not go together.
    """
    check_activation(activation)
    given = (x, w1, b1, w2, b2, activation, recompute)
    if current() is None or not all_ours(x, w1, b1, w2, b2):
        return _composed(*given[:-1])
    if torch.compiler.is_compiling() or not functions.unobserved():
        out: torch.Tensor = torch.ops.gemmsmith.mlp(*given)
        return out
    return (_autocast if torch.is_autocast_enabled(x.device.type) else _autograd)(*given)


def _composed(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """Layer after layer."""
    return fused.linear(fused.linear(x, w1, b1, activation=activation), w2, b2)


def _autograd(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    if wants_gradient(x, w1, b1) and functions.sizes_are_numbers(x, w1, w2):
        sums = b1 is not None and b1.requires_grad
        of = Epilogue.backward_of
        choices = (
            of(activation, activated=True) if recompute else None,
            of(activation, bias_gradient=True) if sums and not recompute else None,
            of(activation) if not recompute else None,
        )
        epilogue = backward.chosen(x, w2, choices)
        if epilogue is not None:
            out: torch.Tensor = MLP.apply(  # type: ignore[no-untyped-call]
                x, w1, b1, w2, b2, epilogue
            )
            return out
    return _composed(x, w1, b1, w2, b2, activation)


def _autocast(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, w1, w2 = (operators.cast(one, dtype) for one in (x, w1, w2))
    b1, b2 = (operators.cast(one, dtype) for one in (b1, b2))
    return _autograd(x, w1, b1, w2, b2, activation, recompute)


class MLP(torch.autograd.Function):
    """`mlp` with a backward epilogue."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        """The second layer's output."""
        parts = epilogue.backward
        assert parts is not None  # noqa: S101 - chosen among such
        forwards = Epilogue.made_of(bias=b1 is not None, activation=parts.activation, aux=True)
        engine = current()
        if forwards and engine and engine.plan(Form.LINEAR, x, w1, epilogue=forwards):
            value, aux = fused.with_aux(x, w1, b1, None, forwards)
        else:
            aux = backward.linear(x, w1, b1).contiguous()
            value = ACTIVATIONS[parts.activation](aux)
        ctx.save_for_backward(x, w1, b1, w2, aux, None if parts.activated else value)
        ctx.epilogue, ctx.activation = epilogue, parts.activation
        out: torch.Tensor = backward.linear(value, w2, b2)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x, both weights and both biases."""
        (dy,) = grads
        x, w1, b1, w2, aux, value = ctx.saved_tensors
        wants_x, wants_w1, wants_b1, wants_w2, wants_b2 = ctx.needs_input_grad[:5]
        dpre, sums = None, None
        if torch.is_grad_enabled():  # a graph of the backward pass itself is asked for
            aux = functional.linear(x, w1, b1)
            value = ACTIVATIONS[ctx.activation](aux)
            dpre = through(ctx.activation, fallback.product(Form.MATMUL, dy, w2), aux)
        elif wants_x or wants_w1 or wants_b1:
            dpre, again, sums = backward.product(dy.contiguous(), w2, aux, ctx.epilogue)
            value = again if value is None else value
        elif value is None:
            value = ACTIVATIONS[ctx.activation](aux)
        _, dw2 = backward.gradients(False, wants_w2, dy, value, w2)
        dx = dw1 = db1 = None
        if dpre is not None:
            dx, dw1 = backward.gradients(wants_x, wants_w1, dpre, x, w1)
            if wants_b1:
                db1 = backward.rows(dpre).sum(0) if sums is None or not sums.numel() else sums
        return dx, dw1, db1, dw2, backward.rows(dy).sum(0) if wants_b2 else None, None


def _compute(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    recompute: bool,  # noqa: ARG001 - the gradient's affair
) -> torch.Tensor:
    return _composed(x, w1, b1, w2, b2, activation).contiguous()


def _fake(
    x: torch.Tensor,
    w1: torch.Tensor,  # noqa: ARG001 - does not change the shape
    b1: torch.Tensor | None,  # noqa: ARG001 - likewise
    w2: torch.Tensor,
    b2: torch.Tensor | None,  # noqa: ARG001 - likewise
    activation: str,  # noqa: ARG001 - likewise
    recompute: bool,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w2.shape[0]))


register(
    "mlp(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation, bool recompute) "
    "-> Tensor",
    _compute,
    _fake,
    _autograd,
    _autocast,
)
