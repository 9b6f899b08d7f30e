"""The activations of `gemmsmith.core.epilogue` in torch: what kernels are held against, and what
runs where none wins. Importing this needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from gemmsmith.core.epilogue import Activation


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


# A plain dictionary: compilers of torch functions cannot look into a read-only view of one.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.GELU: functional.gelu,
    Activation.SILU: functional.silu,
    Activation.RELU2: _relu2,
}


def check_activation(activation: str) -> None:
    """Raises ValueError where there is no such activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def through(activation: Activation, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an activation's argument x, differentiable; dy and x are of one size."""
    match activation:
        case Activation.GELU_TANH:
            out: torch.Tensor = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        case Activation.GELU:
            out = torch.ops.aten.gelu_backward(dy, x)
        case Activation.SILU if torch.is_grad_enabled() and (dy.requires_grad or x.requires_grad):
            sigmoid = torch.sigmoid(x)  # torch's own kernel has no derivative
            out = dy * sigmoid * (1 + x * (1 - sigmoid))
        case Activation.SILU:
            out = torch.ops.aten.silu_backward(dy, x)
        case _:
            out = dy * functional.relu(x).mul(2)
    return out
