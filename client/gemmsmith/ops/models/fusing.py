"""Computes a patched layer's product and everything that follows it with a single kernel.

The functions return None if no winner computes all of it. Then the layer's own forward runs, as
without a patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemmsmith.core.epilogue import GATES
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.engine import Engine, current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.models.forwards import has_no_global_hooks
from gemmsmith.ops.products import backward, feedforward, fused, gated, recording
from gemmsmith.ops.products.registry import CallWay, are_torchs, cast, wants_gradient, way_of


def may_fuse(arguments: tuple[Any, ...]) -> bool:
    """Whether kernels may have these operands, and something has kernels or records."""
    if current() is None and not recording.is_recording():
        return False
    for argument in arguments:  # no `all`: this runs at every call of a layer
        if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
            return False
    return has_no_global_hooks()


def linear(call: fused.LinearCall, way: CallWay | None = None) -> torch.Tensor | None:
    """`gemmsmith.linear` if one kernel computes all of it; else None. `way`: if it is known."""
    way = way or way_of(*call)
    if _is_plain(way, call.x):
        return fused.run_if_fused(way, current(), call)
    x, weight, bias, residual, activation, *_ = call

    def note() -> None:
        epilogue = call.epilogue()
        if epilogue is not None:
            recording.record(x, weight, epilogue)

    def wins(engine: Engine) -> bool:
        epilogue = call.epilogue()
        if epilogue is None or not functions.sizes_are_numbers(x, weight):
            return False
        plan = engine.plan(Form.LINEAR, _as_cast(x), _as_cast(weight), epilogue=epilogue)
        operands = present(bias=_cast(bias), residual=residual)
        return plan is not None and plan.suits(operands)

    def run() -> torch.Tensor:
        return fused.linear(x, weight, bias, activation=activation, residual=residual)

    return _run_observed(way, call, note, wins, run)


def gate(call: gated.GatedCall, way: CallWay | None = None) -> torch.Tensor | None:
    """`gemmsmith.gated_linear` if one kernel computes all of it; else None. `way`: if known."""
    x, weight, up, bias, activation, *_ = call
    # No kernel has a gate and a bias.
    if bias is not None or activation not in GATES:
        return None
    if weight.shape[0] % 2 if up is None else up.shape != weight.shape:
        return None
    way = way or way_of(*call)
    if _is_plain(way, x):
        return gated.run_if_fused(way, current(), call)

    def note() -> None:
        recording.record(x, gated.parts(weight, up)[0].detach(), call.epilogue())

    def wins(engine: Engine) -> bool:
        first, second = (part.detach() for part in gated.parts(weight, up))
        if not functions.lie_alike(first, second) or not functions.sizes_are_numbers(x, first):
            return False
        operands = (_as_cast(x), _as_cast(first))
        return engine.plan(Form.LINEAR, *operands, epilogue=call.epilogue()) is not None

    def run() -> torch.Tensor:
        return gated.gated_linear(x, weight, up, activation=activation)

    return _run_observed(way, call, note, wins, run)


def feed_forward(call: feedforward.MlpCall, *, is_gated: bool) -> tuple[torch.Tensor | None, bool]:
    """Two layers, or the first with its activation: by kernels if they win, else None.

    Both run as one function where their backward product has a fused kernel. Where no gradient is
    needed, nothing is gained beyond `linear` and `gate`.

    Returns the result, and whether it is that of both layers.
    """
    x, weight, _, up, bias, *_ = call
    way = None
    has_backward = is_gated is call.is_gated and (not is_gated or call.activation in GATES)
    if has_backward and wants_gradient(x, weight, up, bias):
        way = way_of(*call)
        both = _both(call, way)
        if both is not None:
            return both, True
        if way is CallWay.TORCH:  # a tensor of the second layer may be the reason
            way = None
    if is_gated:
        return gate(gated.GatedCall(x, weight, up, bias, call.activation), way), False
    return linear(fused.LinearCall(x, weight, bias, activation=call.activation), way), False


def _both(call: feedforward.MlpCall, way: CallWay) -> torch.Tensor | None:
    x, weight, down, up, bias, down_bias, _, activation, *_ = call
    if _is_plain(way, x):
        return feedforward.run_if_fused(current(), call)

    def note() -> None:
        backward.record(x, down, call.backward_epilogues)

    def wins(engine: Engine) -> bool:
        if not functions.sizes_are_numbers(x, weight, down):
            return False
        operands = (_as_cast(x), _as_cast(down))
        return backward.choose(engine, *operands, call.backward_epilogues) is not None

    def run() -> torch.Tensor:
        return feedforward.mlp(
            x, weight, down, up=up, bias=bias, down_bias=down_bias, activation=activation
        )

    return _run_observed(way, call, note, wins, run)


def _is_plain(way: CallWay, x: torch.Tensor) -> bool:
    return way is CallWay.EAGER and not torch.is_autocast_enabled(x.device.type)


def _run_observed(
    way: CallWay,
    call: tuple[Any, ...],
    note: Callable[[], None],
    wins: Callable[[Engine], bool],
    run: Callable[[], torch.Tensor],
) -> torch.Tensor | None:
    """A call under autocast, or while something records, traces or compiles.

    A recorder notes what could be fused, and torch runs the products, which are noted too. A
    compiler gets an operator, which becomes torch's own where no kernel wins.
    """
    if recording.is_recording():
        if are_torchs(*call):
            note()
        return None
    engine = current()
    if engine is None or way is CallWay.TORCH:
        return None
    return run() if torch.compiler.is_compiling() or wins(engine) else None


def _as_cast(tensor: torch.Tensor) -> torch.Tensor | Spec:
    """An operand, or its description after autocast, if autocast is enabled."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return Spec.of(tensor)._replace(dtype=torch.get_autocast_dtype(kind))


def _cast(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None or not torch.is_autocast_enabled(bias.device.type):
        return bias
    as_cast: torch.Tensor = cast(bias, torch.get_autocast_dtype(bias.device.type))
    return as_cast
