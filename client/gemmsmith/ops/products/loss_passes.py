"""The passes over logits, between the products of losses.py.

On a GPU each is one Triton kernel. Elsewhere it consists of torch's own operators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from gemmsmith.ops.engine.by_triton import by_triton

_KERNELS = "gemmsmith.ops.products.triton_losses"
_REDUCTIONS = ("mean", "sum", "none")


class LossOptions(NamedTuple):
    """As of `gemmsmith.linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "mean"

    def check(self, count: int | torch.Tensor | None) -> None:
        """Raises ValueError if an option, or `num_items_in_batch`, is out of its range."""
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {self.label_smoothing}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive or None, got {self.softcap}")
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f"reduction must be one of {_REDUCTIONS}, got {self.reduction!r}")
        if count is not None and self.reduction != "mean":
            raise ValueError(
                "num_items_in_batch replaces the count of a mean: use reduction='mean'"
            )
        if isinstance(count, torch.Tensor) and count.numel() != 1:
            raise ValueError(f"num_items_in_batch must have one element, got {tuple(count.shape)}")


@by_triton(_KERNELS)
def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    scale: torch.Tensor | None,
    options: LossOptions,
    vocabulary: int,
    keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of rows, [R] in FP32, and the gradient of their logits in the logits' memory.

    Args:
        logits: [R, V], or wider: the columns after V are padding, whose gradient is 0.
        labels: [R].
        scale: what gradients are multiplied by: FP32, [1] or [R]. None leaves the logits.
        options: but for the reduction.
        vocabulary: V.
        keeps: leave the logits; their gradient has memory of its own.
    """
    ignored, smoothing, cap, z_loss, _ = options
    wide = capped(logits[:, :vocabulary].float(), cap)
    losses = losses_of(wide, labels, options)
    if scale is None:
        return losses, logits
    sums = wide.logsumexp(-1, keepdim=True)
    gradient = (wide - sums).exp_().mul_(1 + 2 * z_loss * sums).sub_(smoothing / wide.shape[1])
    kept = (labels != ignored)[:, None]
    target = labels[:, None].where(kept, 0)
    gradient.scatter_add_(1, target, torch.full_like(target, smoothing - 1, dtype=wide.dtype))
    if cap is not None:
        gradient.mul_(1 - (wide / cap).square())
    gradient = gradient.mul_(scale[:, None]).where(kept, 0)
    out = torch.empty_like(logits) if keeps else logits
    return losses, out.copy_(functional.pad(gradient, (0, logits.shape[1] - wide.shape[1])))


@by_triton(_KERNELS)
def multiply(matrix: torch.Tensor, factor: torch.Tensor) -> None:
    """`matrix *= factor` of one element in FP32, rounded once. A factor of 1 writes nothing."""
    matrix.mul_(factor)  # of one dimension: torch would round a scalar to the matrix's type


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else (logits / cap).tanh() * cap


def losses_of(logits: torch.Tensor, labels: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """Of rows of capped logits; differentiable."""
    ignored, smoothing, _, z_loss, _ = options
    losses = functional.cross_entropy(
        logits, labels, ignore_index=ignored, label_smoothing=smoothing, reduction="none"
    )
    if z_loss:
        more = z_loss * logits.logsumexp(-1).square()
        losses = losses + more.where(labels != ignored, 0)
    return losses
