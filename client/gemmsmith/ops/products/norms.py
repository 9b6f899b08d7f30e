"""RMS norms whose backward pass is one pass over memory.

torch's fused kernel for the forward pass runs at the speed of memory. Its backward pass reads the
operands twice and takes four times as long as memory needs, mostly for the weight's gradient. Our
Triton kernel computes both gradients; sums are FP32, in an order that depends on the GPU and the
sizes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.ops.engine.by_triton import by_triton, is_final

LEAST = 2**24
"""Least number of elements for our kernel (32 MB of bf16): torch's kernels take 60 to 100 µs there
on an H200, and two launches from Python cost the host 50 µs."""
WIDEST = 8192
"""Elements of a row that a thread block still holds in registers."""
MOST_ROWS = 2**30
"""Rows that the kernel counts, in 32 bits."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` over the last dimension.

    Args:
        x: [..., N], contiguous.
        weight: [N], of the same type.
        epsilon: added to the mean square; by default torch's for the type.
    """
    if not is_ours(x, weight):
        return functional.rms_norm(x, weight.shape, weight, epsilon)
    out: torch.Tensor = RMSNorm.apply(x, weight, epsilon)[0]  # type: ignore[no-untyped-call]
    return out


def is_ours(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether autograd needs a backward pass that our kernel computes faster than torch's."""
    if not x.is_cuda or x.numel() < LEAST or x.shape[-1] > WIDEST:
        return False
    is_counted = x.numel() <= MOST_ROWS * x.shape[-1]
    return is_counted and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


class RMSNorm(torch.autograd.Function):
    """See `rms_norm`. Returns 1 / rms of each row as well, which the backward pass needs."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By torch's own kernel."""
        out: torch.Tensor
        out, scale = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return out, scale

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, of_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Gradients of x and the weight. `scale` has a gradient in gradients of gradients."""
        x, weight, scale = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        of_x = of_weight = None
        if gradient is not None:
            of_x, of_weight = gradients(gradient, x, weight, scale, needs)
        if of_scale is not None and needs[0]:
            through = (of_scale * -scale.pow(3) * x / x.shape[-1]).to(x.dtype)
            of_x = through if of_x is None else of_x + through
        return of_x, of_weight, None


@by_triton("gemmsmith.ops.products.triton_norms")
def gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x[..., N] and weight[N] that are needed; differentiable.

    Args:
        gradient: of the norm, [..., N].
        x: contiguous.
        weight: of the same type.
        scale: 1 / rms of each row, [..., 1] in FP32.
        needs: which of the two; the other is None.
    """
    if x.is_cuda and is_final(gradient, x, weight):
        backward = torch.ops.aten._fused_rms_norm_backward
        of_x, of_weight = backward(gradient, x, list(weight.shape), scale, weight, needs)
        return of_x if needs[0] else None, of_weight if needs[1] else None
    wide = torch.promote_types(x.dtype, torch.float32)
    normal, dy = x.to(wide) * scale, gradient.to(wide)
    of_x = of_weight = None
    if needs[1]:
        rows = tuple(range(x.dim() - 1))
        of_weight = (dy * normal).sum(dim=rows).to(weight.dtype)
    if needs[0]:
        dy = dy * weight.to(wide)
        mean = (dy * normal).mean(dim=-1, keepdim=True)
        of_x = (scale * (dy - normal * mean)).to(x.dtype)
    return of_x, of_weight
