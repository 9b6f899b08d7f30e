"""The activations and the steps of `gemmsmith.core.epilogue` in torch.

Kernels are checked against them, and they run where no kernel won. Importing this needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gemmsmith.core.epilogue import Activation, Backward, EpilogueStep, StepKind

_aten = torch.ops.aten


class TorchFunction(NamedTuple):
    """An activation as torch computes it.

    Attributes:
        value: of x.
        gradient: of x, given dy, the gradient of the value, and x. Differentiable.
        write_value: the value of x into `out`, by torch's kernels of eager code.
        write_gradient: the gradient, from dy, x and its value, into `out`, in the same way.
        calls: names of these kernels, forward and backward, in recorded results.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    write_value: Callable[[Tensor, Tensor], object]
    write_gradient: Callable[[Tensor, Tensor, Tensor | None, Tensor], object]
    calls: tuple[str, str]


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _gelu(approximate: str) -> TorchFunction:
    return TorchFunction(
        partial(functional.gelu, approximate=approximate),
        partial(_aten.gelu_backward, approximate=approximate),
        lambda x, out: _aten.gelu.out(x, approximate=approximate, out=out),
        lambda dy, x, _, out: _aten.gelu_backward.grad_input(
            dy, x, approximate=approximate, grad_input=out
        ),
        ("gelu", "gelu_backward"),
    )


def _silu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (dy.requires_grad or x.requires_grad):
        # torch's silu_backward has no derivative: second gradients need it in parts.
        sigmoid = torch.sigmoid(x)
        return dy * sigmoid * (1 + x * (1 - sigmoid))
    dx: Tensor = _aten.silu_backward(dy, x)
    return dx


FUNCTIONS: Mapping[str, TorchFunction] = {
    Activation.GELU_TANH: _gelu("tanh"),
    Activation.GELU: _gelu("none"),
    Activation.SILU: TorchFunction(
        functional.silu,
        _silu_gradient,
        lambda x, out: _aten.silu.out(x, out=out),
        lambda dy, x, _, out: _aten.silu_backward.grad_input(dy, x, grad_input=out),
        ("silu", "silu_backward"),
    ),
    Activation.RELU2: TorchFunction(
        _relu2,
        lambda dy, x: dy * functional.relu(x).mul(2),
        lambda x, out: torch.square(functional.relu(x), out=out),
        lambda dy, x, _, out: torch.mul(dy, functional.relu(x).mul_(2), out=out),
        ("relu and square", "relu and mul"),
    ),
    Activation.RELU: TorchFunction(
        functional.relu,
        lambda dy, x: _aten.threshold_backward(dy, x, 0),
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda dy, x, _, out: _aten.threshold_backward.grad_input(dy, x, 0, grad_input=out),
        ("relu", "threshold_backward"),
    ),
    Activation.SIGMOID: TorchFunction(
        torch.sigmoid,
        lambda dy, x: _aten.sigmoid_backward(dy, torch.sigmoid(x)),
        lambda x, out: torch.sigmoid(x, out=out),
        lambda dy, _, value, out: _aten.sigmoid_backward.grad_input(dy, value, grad_input=out),
        ("sigmoid", "sigmoid_backward"),
    ),
}

# A plain dictionary: torch.compile cannot trace through a MappingProxyType.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: function.value for name, function in FUNCTIONS.items()
}


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def through(activation: str, dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, given dy, the gradient of activation(x). Differentiable.

    dy and x have the same shape.
    """
    return FUNCTIONS[activation].gradient(dy, x)


def gate_gradients(activation: str, dy: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from that of `activation(gate) * up`, [..., I] each; differentiable.

    Args:
        activation: of the gate.
        dy: [..., I].
        aux: [..., 2·I]: gate, then up.
    """
    gate, up = aux.chunk(2, -1)
    return through(activation, dy * up, gate), dy * ACTIVATIONS[activation](gate)


def gradients(parts: Backward, dy: Tensor, aux: Tensor) -> tuple[Tensor, ...]:
    """The gradient of aux, or those of gate and up, from the value's; differentiable."""
    if parts.gated:
        return gate_gradients(parts.activation, dy, aux)
    return (through(parts.activation, dy, aux),)


def activated(parts: Backward, aux: Tensor) -> Tensor:
    """The activation's value, for a gate times up; differentiable."""
    activate = ACTIVATIONS[parts.activation]
    if not parts.gated:
        return activate(aux)
    gate, up = aux.chunk(2, -1)
    return activate(gate) * up


def follow(
    steps: Sequence[EpilogueStep], value: Tensor, operands: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """What steps make of a product, and what they store in aux; differentiable.

    Args:
        steps: of a forward epilogue.
        value: the product.
        operands: what the steps read, by name; broadcastable to the product.
    """
    stored = None
    for step in steps:
        match step.kind:
            case StepKind.MULTIPLY:
                value = value * operands[step.by]
            case StepKind.ADD:
                value = value + operands[step.by]
            case StepKind.STORE:
                stored = value
            case StepKind.APPLY:
                value = ACTIVATIONS[step.by](value)
            case StepKind.GATE:
                gate, up = value.chunk(2, -1)
                value = ACTIVATIONS[step.by](gate) * up
    return value, stored
