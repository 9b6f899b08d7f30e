"""Heads: linear layers whose logits are deferred until a loss or something else needs them.

A call is deferred in training, in 16 bits or under autocast, while winners are in use, and only
where the weight still has its values when the logits are needed. So hooks, checkpointed regions,
CUDA graphs, transforms, modes, sharded and temporary weights run torch's own way.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import Parameter

from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.recomputing import saved_tensors_hooks
from gemmsmith.ops.models.deferred_logits import defer, is_read
from gemmsmith.ops.models.norms import kind_in_use
from gemmsmith.ops.products.registry import CallWay, autocast, wants_gradient, way_of

_TYPES = (torch.bfloat16, torch.float16)


def logits(x: Any, weight: Any, bias: Any) -> torch.Tensor | None:
    """`linear(x, weight, bias)`, deferred. Returns None if it must be computed now."""
    if torch.compiler.is_compiling() or not _is_lasting(weight, bias):
        return None
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.device != weight.device:
        return None
    if way_of(x, weight, bias) is not CallWay.EAGER or not wants_gradient(x, weight, bias):
        return None
    if x.device.type != kind_in_use() or is_read(weight):
        return None
    engine = current()
    if engine is None or engine.is_invariant or engine.platform.capturing():
        return None
    operand, matrix, vector = autocast(x, weight, bias)
    sizes = (*x.shape, *weight.shape)
    if operand.dtype not in _TYPES or 0 in sizes or x.shape[-1] != weight.shape[1]:
        return None
    if matrix.dtype is not operand.dtype or (bias is not None and vector.dtype != operand.dtype):
        return None
    return defer(operand, matrix, vector, weight)


def _is_lasting(weight: Any, bias: Any) -> bool:
    """Whether operands are parameters of the program that keep their memory after the forward pass.

    Views of sharded and replicated weights are no parameters, and FSDP2 frees those that are. Hooks
    on saved tensors move them, or compute them again.
    """
    if type(weight) is not Parameter or not (bias is None or type(bias) is Parameter):
        return False
    states = sys.modules.get("torch.distributed._composable_state")
    if states is not None and states._module_state_mapping:
        return False
    return saved_tensors_hooks(True) is None
