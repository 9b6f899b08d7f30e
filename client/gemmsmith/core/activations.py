"""The activations of `gemmsmith.core.epilogue` in torch.

Kernels are checked against them, and they run where no kernel won. Importing this needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from gemmsmith.core.epilogue import Activation


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


# A plain dictionary: torch.compile cannot trace through a MappingProxyType.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.GELU: functional.gelu,
    Activation.SILU: functional.silu,
    Activation.RELU2: _relu2,
}


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def through(activation: Activation, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x, given dy, the gradient of activation(x). Differentiable.

    dy and x have the same shape.
    """
    match activation:
        case Activation.GELU_TANH:
            dx: torch.Tensor = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        case Activation.GELU:
            dx = torch.ops.aten.gelu_backward(dy, x)
        case Activation.SILU if torch.is_grad_enabled() and (dy.requires_grad or x.requires_grad):
            # torch's silu_backward has no derivative: second gradients need it in parts.
            sigmoid = torch.sigmoid(x)
            dx = dy * sigmoid * (1 + x * (1 - sigmoid))
        case Activation.SILU:
            dx = torch.ops.aten.silu_backward(dy, x)
        case _:
            dx = dy * functional.relu(x).mul(2)
    return dx


def gate_gradients(
    activation: Activation, dy: torch.Tensor, aux: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up from that of `activation(gate) * up`, [..., I] each; differentiable.

    Args:
        activation: of the gate.
        dy: [..., I].
        aux: [..., 2·I]: gate, then up.
    """
    gate, up = aux.chunk(2, -1)
    return through(activation, dy * up, gate), dy * ACTIVATIONS[activation](gate)
