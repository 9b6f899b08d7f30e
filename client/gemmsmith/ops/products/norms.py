"""RMS norms whose backward pass is one pass over memory.

torch's fused kernel for the forward pass is as fast as memory. Its backward pass reads the operands
twice, in kernels that take four times as long as memory does, of which most is the weight's
gradient. One Triton kernel computes both gradients; sums are FP32, in an order that depends on the
GPU and the sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

LEAST = 2**24
"""Elements from which the backward pass runs our kernel (32 MB of bf16): torch's take 60 to 100 µs
there on an H200, and the host 50 µs for two launches from Python."""
WIDEST = 8192
"""Elements of a row that a thread block still holds in registers."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` over the last dimension.

    Args:
        x: [..., N], contiguous.
        weight: [N], of the same type.
        epsilon: added to the mean square; None: torch's default for the type.
    """
    if not is_ours(x, weight):
        return functional.rms_norm(x, weight.shape, weight, epsilon)
    out: torch.Tensor = RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


def is_ours(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there will be a backward pass that our kernel computes faster than torch's."""
    is_large = x.is_cuda and x.numel() >= LEAST and x.shape[-1] <= WIDEST
    return is_large and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


class RMSNorm(torch.autograd.Function):
    """See `rms_norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float | None
    ) -> torch.Tensor:
        """By torch's own kernel, which also gives what the backward pass scales by."""
        out: torch.Tensor
        out, scale = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.epsilon = epsilon
        return out

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Both gradients, whichever are wanted."""
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # they are differentiated again
            out = functional.rms_norm(x, weight.shape, weight, ctx.epsilon)
            inputs = [one for one in (x, weight) if one.requires_grad]
            found = iter(torch.autograd.grad(out, inputs, gradient, create_graph=True))
            of_x, of_weight = (next(found) if one.requires_grad else None for one in (x, weight))
            return of_x, of_weight, None
        of_x, of_weight = gradients(gradient.contiguous(), x, weight, scale)
        return of_x, of_weight, None


def gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x[..., N] and weight[N]; `scale` is 1 / rms of each row, in FP32."""
    if x.is_cuda:
        from gemmsmith.ops.products import triton_norms

        return triton_norms.gradients(gradient, x, weight, scale)
    normal, wanted = x.float() * scale, gradient.float()
    of_weight = (wanted * normal).flatten(0, -2).sum(dim=0)
    wanted = wanted * weight.float()
    of_x = scale * (wanted - normal * (wanted * normal).mean(dim=-1, keepdim=True))
    return of_x.to(x.dtype), of_weight.to(weight.dtype)
