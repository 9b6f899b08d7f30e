"""Gated MLPs whose backward pass takes the gradients of gate and up within the product before them.

As `mlp_backward`, with gate and up in one tensor throughout. Kept for the backward pass are x, that
tensor and act(gate)·up; torch keeps act(gate) as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.activations import ACTIVATIONS, check_activation
from gemmsmith.epilogue import Epilogue
from gemmsmith.ops import backward, fallback, functions, fused, operators
from gemmsmith.ops.engine import current
from gemmsmith.ops.forms import Form
from gemmsmith.ops.registry import all_ours, register, wants_gradient


def gated_mlp(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
) -> torch.Tensor:
    """`(activation(x[..., K] · gate[I, K]ᵀ) * (x · up[I, K]ᵀ)) · w_down[N, I]ᵀ`.

    Under autocast all are cast, as torch's layers do.

    Args:
        x: any number of leading dimensions.
        gate: [I, K]; or [2I, K], the gate first, and no `up`.
        up: [I, K], or None.
        w_down: [N, I].
        activation: as of `mlp`; kernels have `silu` and `gelu_tanh`.
        recompute: keep less for the backward pass, which computes the activation again.

    Raises:
        ValueError: there is no such activation.
        RuntimeError: torch's, where the sizes or types do not go together.
    """
    check_activation(activation)
    given = (x, gate, up, w_down, activation, recompute)
    if current() is None or not all_ours(x, gate, up, w_down):
        return _composed(*given[:-1])
    if torch.compiler.is_compiling() or not functions.unobserved():
        out: torch.Tensor = torch.ops.gemmsmith.gated_mlp(*given)
        return out
    of = _autocast if torch.is_autocast_enabled(x.device.type) else _autograd
    return of(*given)


def _composed(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    linear = fused.linear(x, gate)
    gated, other = linear.chunk(2, -1) if up is None else (linear, fused.linear(x, up))
    return fused.linear(ACTIVATIONS[activation](gated) * other, w_down)


def _autograd(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    if wants_gradient(x, gate, up) and functions.sizes_are_numbers(x, gate, w_down):
        choice = Epilogue.backward_of(activation, gated=True, activated=recompute)
        epilogue = backward.chosen(x, w_down, (choice,))
        if epilogue is not None:
            out: torch.Tensor = GatedMLP.apply(  # type: ignore[no-untyped-call]
                x, gate, up, w_down, epilogue
            )
            return out
    return _composed(x, gate, up, w_down, activation)


def _autocast(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, gate, up, w_down = (operators.cast(one, dtype) for one in (x, gate, up, w_down))
    return _autograd(x, gate, up, w_down, activation, recompute)


def _side_by_side(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`x·gateᵀ | x·upᵀ`. Below autograd.

    Kernels of ours write packed rows; cuBLAS writes the halves where they belong.
    """
    if not functions.unobserved():
        return torch.cat([backward.linear(x, gate), backward.linear(x, up)], -1)
    rows, width = backward.rows(x), gate.shape[0]
    found = x.new_empty((rows.shape[0], 2 * width))
    torch.mm(rows, gate.t(), out=found[:, :width])
    torch.mm(rows, up.t(), out=found[:, width:])
    return found.view(*x.shape[:-1], 2 * width)


class GatedMLP(torch.autograd.Function):
    """`gated_mlp` with a backward epilogue: gate and up lie in one tensor throughout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor | None,
        w_down: torch.Tensor,
        epilogue: Epilogue,
    ) -> torch.Tensor:
        """The second layer's output."""
        parts = epilogue.backward
        assert parts is not None  # noqa: S101 - chosen among such
        aux = backward.linear(x, gate).contiguous() if up is None else _side_by_side(x, gate, up)
        gated, other = aux.chunk(2, -1)
        value = ACTIVATIONS[parts.activation](gated) * other
        ctx.save_for_backward(x, gate, up, w_down, aux, None if parts.activated else value)
        ctx.epilogue, ctx.activation = epilogue, parts.activation
        out: torch.Tensor = backward.linear(value, w_down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x and all weights."""
        (dy,) = grads
        x, gate, up, w_down, aux, value = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad[:4]
        again, daux = torch.is_grad_enabled(), None
        if again:
            layers = [functional.linear(x, one) for one in (gate, up) if one is not None]
            dh = fallback.product(Form.MATMUL, dy, w_down)
            daux, value = backward.through_gate(ctx.activation, dh, torch.cat(layers, -1))
        elif wants_x or wants_gate or wants_up:
            daux, given, _ = backward.product(dy.contiguous(), w_down, aux, ctx.epilogue)
            value = given if value is None else value
        elif value is None:
            gated, other = aux.chunk(2, -1)
            value = ACTIVATIONS[ctx.activation](gated) * other
        _, ddown = backward.gradients(False, wants_down, dy, value, w_down)
        dx = dgate = dup = None
        if daux is not None and up is None:
            dx, dgate = backward.gradients(wants_x, wants_gate, daux, x, gate)
        elif daux is not None:
            of_gate, of_up = daux.chunk(2, -1)
            dx, dgate = backward.gradients(wants_x, wants_gate, of_gate, x, gate)
            more, dup = backward.gradients(wants_x, wants_up, of_up, x, up)
            if dx is not None and more is not None:
                dx = dx + more if again else dx.add_(more)
        return dx, dgate, dup, ddown, None


def _compute(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,  # noqa: ARG001 - the gradient's affair
) -> torch.Tensor:
    return _composed(x, gate, up, w_down, activation).contiguous()


def _fake(
    x: torch.Tensor,
    gate: torch.Tensor,  # noqa: ARG001 - does not change the shape
    up: torch.Tensor | None,  # noqa: ARG001 - likewise
    w_down: torch.Tensor,
    activation: str,  # noqa: ARG001 - likewise
    recompute: bool,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


register(
    "gated_mlp(Tensor x, Tensor gate, Tensor? up, Tensor w_down, str activation, bool recompute) "
    "-> Tensor",
    _compute,
    _fake,
    _autograd,
    _autocast,
)
