"""The cross-entropy of deferred logits, from the operands of their head."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from gemmsmith.ops.models.deferred import Deferred, HeadCall
from gemmsmith.ops.products.logit_scaling import LogitScaling
from gemmsmith.ops.products.losses import linear_cross_entropy

_aten = torch.ops.aten
_OPTIONS = {"ignore_index", "label_smoothing", "reduction"}
SCALES = {_aten.mul.Tensor, _aten.div.Tensor}


def cross_entropy(logits: Any, target: Any, options: dict[str, Any]) -> torch.Tensor | None:
    """`torch.nn.functional.cross_entropy` without logits. Returns None if torch must compute it."""
    deferred = getattr(logits, "deferred", None)
    if not isinstance(deferred, Deferred) or type(target) is not torch.Tensor:
        return None
    if any(options[name] is not None for name in options.keys() - _OPTIONS):
        return None
    head = deferred.head
    if head.is_read or head.is_kept or not head.is_unchanged():
        return None
    with torch._C.DisableTorchFunctionSubclass():
        rows = _rows(logits) if logits.dim() == 2 else None
        fits = target.dtype is torch.int64 and target.shape == logits.shape[:1]
        if rows is None or not fits or target.device != logits.device:
            return None
        dtype, kind = logits.dtype, logits.device.type
    x, bias, softcap = rows
    is_wide = torch.is_autocast_enabled(kind)  # which casts what a loss reads to FP32
    with torch.autocast(kind, enabled=False):
        ours = {name: options[name] for name in options.keys() & _OPTIONS}
        values = head.held_logits(x)
        loss = linear_cross_entropy(
            x, head.weight, target, bias, softcap=softcap, logits=values, **ours
        )
        loss = loss if is_wide else loss.to(dtype)
    head.has_loss = True
    if loss.grad_fn is not None:
        loss.grad_fn.register_prehook(partial(_before_backward, weakref.ref(head)))
    return loss


def _before_backward(reference: weakref.ref[HeadCall], _gradients: object) -> None:
    head = reference()
    if head is not None:  # the program holds logits
        head.keep()


_Rows = tuple[torch.Tensor, torch.Tensor | None, float | None]
"""The rows of x that remain, scaled; the bias, scaled; the softcap."""


def _rows(logits: Any) -> _Rows | None:
    """What steps leave of the operands. Returns None if a loss cannot follow them."""
    steps: list[Deferred] = []
    tensor = logits
    while tensor is not None:
        if tensor._backward_hooks or tensor.retains_grad:
            return None
        steps.append(tensor.deferred)
        tensor = tensor.deferred.tensor
    if steps[-1].source is not None:  # detached
        return None
    head = logits.deferred.head
    x, (vocabulary, depth) = head.x, head.weight.shape
    scaling = LogitScaling()
    for deferred in reversed(steps[:-1]):
        if not deferred.is_recorded or deferred.like.shape[-1] != vocabulary:
            return None
        number, follows = deferred.arguments[0] if deferred.step in SCALES else 0, True
        match deferred.step:
            case _aten.slice.Tensor:
                x = _aten.slice(x, *deferred.arguments)
            case _aten.view.default | _aten._unsafe_view.default:
                x = x.reshape(*deferred.like.shape[:-1], depth)
            case _aten.tanh.default:
                follows = scaling.tanh()
            case _aten.mul.Tensor:
                follows = scaling.multiply(number)
            case _aten.div.Tensor:
                follows = scaling.divide(number)
            case _aten.clone.default | _aten._to_copy.default:
                follows = deferred.like.dtype in (torch.float32, x.dtype)
            case _:
                follows = False
        if not follows:
            return None
    of_operands = scaling.of_operands(x.dtype)
    if of_operands is None:
        return None
    scale, softcap = of_operands
    if scale == 1:
        return x, head.bias, softcap
    return x * scale, None if head.bias is None else head.bias * scale, softcap
