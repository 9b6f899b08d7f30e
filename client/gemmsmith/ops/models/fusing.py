"""Computes a patched layer's product and everything that follows it with a single kernel.

The functions return None if no winner computes all of it. Then the layer's own forward runs, as
without a patch.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.epilogue import GATES, Activation, Epilogue
from gemmsmith.ops.engine import functions, observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.models.forwards import has_no_global_hooks
from gemmsmith.ops.products import backward, feedforward, fused, operators, telling
from gemmsmith.ops.products.gated import gated_linear, parts
from gemmsmith.ops.products.registry import are_torchs, ours, wants_gradient


def may_fuse(operands: tuple[Any, ...]) -> bool:
    """Whether kernels or a recording are in use, and the operands are floating-point tensors."""
    if current() is None and not telling.is_told():
        return False
    if not all(
        isinstance(operand, torch.Tensor) and operand.is_floating_point() for operand in operands
    ):
        return False
    return has_no_global_hooks()


def may_be_ours(*operands: torch.Tensor | None) -> bool:
    """Whether a kernel may compute with the operands, or a recording may count the product."""
    return are_torchs(*operands) if telling.is_told() else ours(*operands)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`gemmsmith.linear` with a single kernel; None if no kernel computes all of it."""
    if not may_be_ours(x, weight, bias, residual):
        return None
    if torch.compiler.is_compiling():
        if current() is None:
            return None
        return fused.linear(x, weight, bias, activation=activation, residual=residual)
    epilogue = Epilogue.made_of(
        bias=bias is not None,
        activation=activation,
        residual=residual is not None,
        aux=activation is not None and wants_gradient(x, weight, bias),
    )
    if epilogue is None:
        return None
    if telling.is_told():  # torch runs the plain product, which is recorded as well
        telling.tell(x, weight, epilogue)
        return None
    plan = _plan(x, weight, epilogue)
    if plan is None or not plan.suits(_cast(bias), residual):
        return None
    return fused.linear(x, weight, bias, activation=activation, residual=residual)


def gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor | None:
    """`gemmsmith.gated_linear` with a single kernel; None if no kernel computes all of it."""
    weights = [gate] if up is None else [gate, up]
    # Kernels with a gate do not add a bias.
    if bias is not None or activation not in GATES or not may_be_ours(x, *weights):
        return None
    if torch.compiler.is_compiling():
        return None if current() is None else gated_linear(x, gate, up, activation=activation)
    if up is None and gate.shape[0] % 2:
        return None
    first, second = parts(gate.detach(), None if up is None else up.detach())
    aux = wants_gradient(x, *weights)
    epilogue = Epilogue.made_of(activation=activation, gate=True, aux=aux)
    if epilogue is None or first.shape != second.shape:
        return None
    if telling.is_told():
        telling.tell(x, first, epilogue)
        return None
    plan = _plan(x, first, epilogue)
    if plan is None or not plan.pairs(first, second):
        return None
    return gated_linear(x, gate, up, activation=activation)


def mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: Activation,
    *,
    is_gated: bool,
) -> torch.Tensor | None:
    """`gemmsmith.mlp`; None if its backward pass has no fused kernel.

    Without a gradient, `linear` and `gated` are as good, so the result is None as well.
    """
    shapes_match = is_gated is feedforward.is_gated(weight, up, down)
    if not shapes_match or not may_be_ours(x, weight, up, bias, down, down_bias):
        return None
    if (is_gated and activation not in GATES) or not wants_gradient(x, weight, up, bias):
        return None
    if not torch.compiler.is_compiling():
        choices = feedforward.backward_epilogues(activation, is_gated=is_gated, bias=bias)
        if telling.is_told():
            backward.tell(x, down, choices)
            return None
        if not functions.sizes_are_numbers(x, weight, down):
            return None
        epilogue = backward.chosen(_as_cast(x), _as_cast(down), choices)
        if epilogue is None:
            return None
        if observers.unobserved() and not torch.is_autocast_enabled(x.device.type):
            # `feedforward.mlp` would do the same after repeating all checks and the choice.
            d: torch.Tensor = feedforward.MLP.apply(  # type: ignore[no-untyped-call]
                x, weight, down, up, bias, down_bias, None, epilogue
            )[0]
            return d
    elif current() is None:
        return None
    return feedforward.mlp(
        x, weight, down, up=up, bias=bias, down_bias=down_bias, activation=activation
    )


def _plan(x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> Plan | None:
    """The plan for the product, in the types after autocast."""
    engine = current()
    if engine is None or not functions.sizes_are_numbers(x, weight):
        return None
    return engine.plan(Form.LINEAR, _as_cast(x), _as_cast(weight), epilogue=epilogue)


def _as_cast(tensor: torch.Tensor) -> torch.Tensor | Spec:
    """An operand, or its description after autocast, if autocast is enabled."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return Spec.of(tensor)._replace(dtype=torch.get_autocast_dtype(kind))


def _cast(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None or not torch.is_autocast_enabled(bias.device.type):
        return bias
    cast: torch.Tensor = operators.cast(bias, torch.get_autocast_dtype(bias.device.type))
    return cast
