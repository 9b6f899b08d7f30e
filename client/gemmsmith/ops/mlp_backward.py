"""MLPs whose backward pass takes the activation's gradient within the product before it.

A layer alone cannot: the gradient of its activation needs the next layer's input gradient, and one
kernel computes both only where the two layers are known together. `mlp` and `gated_mlp` are those
two as one autograd function, where the backward product with an epilogue (`gemmsmith.epilogue`) has
a winner for these sizes; else they are composed of layers, as anyone would write them.

Kept for the backward pass are x, what the activation is applied to and the activation's value,
which is what torch keeps, or less: of a gated one torch keeps act(gate) as well. With `recompute`
the value is not kept either, and the backward product gives it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.activations import ACTIVATIONS, through
from gemmsmith.epilogue import Epilogue
from gemmsmith.ops import backward, fallback, functions, fused, operators
from gemmsmith.ops.engine import Engine, current
from gemmsmith.ops.forms import Form
from gemmsmith.ops.registry import ours, register, wants_gradient


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
    _check(activation)
    given = (x, w1, b1, w2, b2, activation, recompute)
    if current() is None or not _all_ours(x, w1, b1, w2, b2):
        return _composed(*given[:-1])
    if torch.compiler.is_compiling() or not functions.unobserved():
        out: torch.Tensor = torch.ops.gemmsmith.mlp(*given)
        return out
    return (_autocast if torch.is_autocast_enabled(x.device.type) else _autograd)(*given)


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
    _check(activation)
    given = (x, gate, up, w_down, activation, recompute)
    if current() is None or not _all_ours(x, gate, up, w_down):
        return _composed_gated(*given[:-1])
    if torch.compiler.is_compiling() or not functions.unobserved():
        out: torch.Tensor = torch.ops.gemmsmith.gated_mlp(*given)
        return out
    of = _autocast_gated if torch.is_autocast_enabled(x.device.type) else _autograd_gated
    return of(*given)


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def _all_ours(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return all(ours(x, one) for one in others if one is not None)


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


def _composed_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    linear = fused.linear(x, gate)
    gated, other = linear.chunk(2, -1) if up is None else (linear, fused.linear(x, up))
    return fused.linear(ACTIVATIONS[activation](gated) * other, w_down)


def _wins(engine: Engine | None, x: torch.Tensor, w: torch.Tensor, epilogue: Epilogue) -> bool:
    """Whether the backward product of a layer whose input has x's leading sizes has a winner."""
    if engine is None or w.dim() != 2 or x.dim() < 2:
        return False
    dy = functions.contiguous(x, (*x.shape[:-1], w.shape[0]))
    return engine.plan(Form.MATMUL, dy, w, epilogue=epilogue) is not None


def _chosen(
    x: torch.Tensor, w: torch.Tensor, choices: tuple[Epilogue | None, ...]
) -> Epilogue | None:
    """The first of these that has a winner."""
    engine = current()
    return next((one for one in choices if one and _wins(engine, x, w, one)), None)


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
        epilogue = _chosen(x, w2, choices)
        if epilogue is not None:
            out: torch.Tensor = MLP.apply(  # type: ignore[no-untyped-call]
                x, w1, b1, w2, b2, epilogue
            )
            return out
    return _composed(x, w1, b1, w2, b2, activation)


def _autograd_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    if wants_gradient(x, gate, up) and functions.sizes_are_numbers(x, gate, w_down):
        choice = Epilogue.backward_of(activation, gated=True, activated=recompute)
        epilogue = _chosen(x, w_down, (choice,))
        if epilogue is not None:
            out: torch.Tensor = GatedMLP.apply(  # type: ignore[no-untyped-call]
                x, gate, up, w_down, epilogue
            )
            return out
    return _composed_gated(x, gate, up, w_down, activation)


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


def _autocast_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, gate, up, w_down = (operators.cast(one, dtype) for one in (x, gate, up, w_down))
    return _autograd_gated(x, gate, up, w_down, activation, recompute)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """A layer's product by its own winner. Below autograd."""
    engine, form = current(), Form.LINEAR if bias is None else Form.LINEAR_BIAS
    plan = None if engine is None else engine.plan(form, x, weight)
    return functions.linear_below(x, weight, bias, plan)


def _side_by_side(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`x·gateᵀ | x·upᵀ`. Below autograd.

    Kernels of ours write packed rows; cuBLAS writes the halves where they belong.
    """
    if not functions.unobserved():
        return torch.cat([_linear(x, gate), _linear(x, up)], -1)
    rows, width = backward.rows(x), gate.shape[0]
    found = x.new_empty((rows.shape[0], 2 * width))
    torch.mm(rows, gate.t(), out=found[:, :width])
    torch.mm(rows, up.t(), out=found[:, width:])
    return found.view(*x.shape[:-1], 2 * width)


def _gradients(
    wants_x: bool, wants_weight: bool, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of a layer's input and weight."""
    multiply = fallback.product if torch.is_grad_enabled() else functions.product
    dx = multiply(Form.MATMUL, dy, weight) if wants_x else None
    return dx, multiply(Form.WEIGHT_GRADIENT, dy, x) if wants_weight else None


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
            aux = _linear(x, w1, b1).contiguous()
            value = ACTIVATIONS[parts.activation](aux)
        ctx.save_for_backward(x, w1, b1, w2, aux, None if parts.activated else value)
        ctx.epilogue, ctx.activation = epilogue, parts.activation
        out: torch.Tensor = _linear(value, w2, b2)
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
        _, dw2 = _gradients(False, wants_w2, dy, value, w2)
        dx = dw1 = db1 = None
        if dpre is not None:
            dx, dw1 = _gradients(wants_x, wants_w1, dpre, x, w1)
            if wants_b1:
                db1 = backward.rows(dpre).sum(0) if sums is None or not sums.numel() else sums
        return dx, dw1, db1, dw2, backward.rows(dy).sum(0) if wants_b2 else None, None


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
        aux = _linear(x, gate).contiguous() if up is None else _side_by_side(x, gate, up)
        gated, other = aux.chunk(2, -1)
        value = ACTIVATIONS[parts.activation](gated) * other
        ctx.save_for_backward(x, gate, up, w_down, aux, None if parts.activated else value)
        ctx.epilogue, ctx.activation = epilogue, parts.activation
        out: torch.Tensor = _linear(value, w_down)
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
        _, ddown = _gradients(False, wants_down, dy, value, w_down)
        dx = dgate = dup = None
        if daux is not None and up is None:
            dx, dgate = _gradients(wants_x, wants_gate, daux, x, gate)
        elif daux is not None:
            of_gate, of_up = daux.chunk(2, -1)
            dx, dgate = _gradients(wants_x, wants_gate, of_gate, x, gate)
            more, dup = _gradients(wants_x, wants_up, of_up, x, up)
            if dx is not None and more is not None:
                dx = dx + more if again else dx.add_(more)
        return dx, dgate, dup, ddown, None


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


def _compute_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    w_down: torch.Tensor,
    activation: str,
    recompute: bool,  # noqa: ARG001 - the gradient's affair
) -> torch.Tensor:
    return _composed_gated(x, gate, up, w_down, activation).contiguous()


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


def _fake_gated(
    x: torch.Tensor,
    gate: torch.Tensor,  # noqa: ARG001 - does not change the shape
    up: torch.Tensor | None,  # noqa: ARG001 - likewise
    w_down: torch.Tensor,
    activation: str,  # noqa: ARG001 - likewise
    recompute: bool,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


register(
    "mlp(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation, bool recompute) "
    "-> Tensor",
    _compute,
    _fake,
    _autograd,
    _autocast,
)
register(
    "gated_mlp(Tensor x, Tensor gate, Tensor? up, Tensor w_down, str activation, bool recompute) "
    "-> Tensor",
    _compute_gated,
    _fake_gated,
    _autograd_gated,
    _autocast_gated,
)
