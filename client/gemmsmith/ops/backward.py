"""The product of a backward pass that takes an activation's gradient with it.

P = dY·W of the layer after an activation, and what that activation was applied to, give the
gradient of the latter: by one kernel where a winner says so (`gemmsmith.epilogue`), by torch's
steps otherwise.
"""

from __future__ import annotations

import torch

from gemmsmith.activations import ACTIVATIONS, through
from gemmsmith.epilogue import Activation, Epilogue
from gemmsmith.ops import functions
from gemmsmith.ops.engine import current
from gemmsmith.ops.forms import Form
from gemmsmith.ops.registry import register

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""D, the activation's value, the bias gradient; empty where the epilogue gives none."""


def product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: Epilogue
) -> Tensors:
    """`dy · weight` and what follows it, by a kernel or by torch. Below autograd."""
    if functions.unobserved():
        return _computed(dy, weight, aux, epilogue)
    with torch._C._AutoDispatchBelowAutograd():
        found: Tensors = torch.ops.gemmsmith.backward_product(dy, weight, aux, epilogue.value)
        return found


def _computed(dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: str) -> Tensors:
    """The same, below tracers."""
    what, engine, none = Epilogue(epilogue), current(), aux.new_empty(0)
    if engine is not None:
        found = engine.backward(Form.MATMUL, dy, weight, what, aux)
        if found is not None:
            gradient, value, sums = found
            return gradient, none if value is None else value, none if sums is None else sums
    parts = what.backward
    assert parts is not None  # noqa: S101 - the functions below name no other
    dh = functions.product(Form.MATMUL, dy, weight)
    if parts.gated:
        gradient, value = through_gate(parts.activation, dh, aux)
    else:
        gradient = through(parts.activation, dh, aux)
        value = ACTIVATIONS[parts.activation](aux) if parts.activated else none
    sums = rows(gradient).sum(0) if parts.bias_gradient else none
    return gradient, value if parts.activated else none, sums


def through_gate(
    activation: Activation, dh: torch.Tensor, aux: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of gate and up, and act(gate)·up; differentiable."""
    gate, up = aux.chunk(2, -1)
    value = ACTIVATIONS[activation](gate)
    return torch.cat([through(activation, dh * up, gate), dh * value], -1), value * up


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """All leading dimensions as one."""
    return tensor.reshape(-1, tensor.shape[-1])


def _fake_product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: str
) -> Tensors:
    parts, n = Epilogue(epilogue).backward, weight.shape[1]
    assert parts is not None  # noqa: S101 - the operator's schema is of such
    return (
        aux.new_empty(aux.shape),
        aux.new_empty((*dy.shape[:-1], n) if parts.activated else (0,)),
        aux.new_empty((n,) if parts.bias_gradient else (0,)),
    )


register(
    "backward_product(Tensor dy, Tensor weight, Tensor aux, str epilogue) "
    "-> (Tensor, Tensor, Tensor)",
    _computed,
    _fake_product,
)
