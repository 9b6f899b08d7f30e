"""Mixtures of experts of transformers in a patched model, computed by `gemmsmith.experts`.

They are recognized by the function with which transformers replaces their forward, and which calls
an implementation by its name. If the model uses a default implementation of transformers, experts
that are SwiGLU without biases run as with the implementation `gemmsmith` (`experts_forward`),
provided that one of their grouped products has a winner. The model's configuration is unchanged.
The experts' own forward runs if hooks would be skipped, or if a program has replaced functions that
it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gemmsmith.ops.below.prospects import may_run
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.models.forwards import LEFT, DependsOn, has_no_global_hooks, is_plain
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.products import recording
from gemmsmith.ops.products.grouped import grouped_mm
from gemmsmith.ops.products.mixture import computed, experts
from gemmsmith.ops.products.mixture_operands import Operands, refusal
from gemmsmith.ops.products.registry import ours

_FORWARD = (
    "transformers.integrations.moe",
    "use_experts_implementation.<locals>.wrapper.<locals>.forward",
)
_PLAIN = ("eager", "grouped_mm")
"""transformers' default implementations. Others were chosen by the user, and are kept."""


_WEIGHTS = DependsOn(weights=((None, "gate_up_proj"), (None, "down_proj")))


@dataclass(frozen=True, kw_only=True)
class ExpertsRecipe:
    """Experts with weights [E, 2 * I, K] and [E, K, I].

    Attributes:
        interface: transformers' registry of implementations, by name.
        grouped: the implementation `grouped_mm`. `eager` is the layer's own forward, and not in the
            registry.
        relies_on: functions that must be the originals.
        depends_on: as of `forwards.Recipe`.
    """

    interface: Any
    grouped: Any
    relies_on: tuple[Original, ...]
    depends_on: DependsOn = _WEIGHTS

    def __str__(self) -> str:
        return "experts"


def experts_recipe(module: nn.Module) -> ExpertsRecipe | None:
    """The recipe of a module of experts; None if the module is not recognized."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    # The wrapper has the name of the wrapped function, but its own code and globals.
    if code is None or code.co_qualname != _FORWARD[1]:
        return None
    if forward.__globals__.get("__name__") != _FORWARD[0] or not is_swiglu(module):
        return None
    closed_over = dict(zip(code.co_freevars, forward.__closure__, strict=True))
    relies_on = originals(*learn().calls, (type(module.act_fn), "forward"))
    if relies_on is None or "experts_interface" not in closed_over:
        return None
    interface = closed_over["experts_interface"].cell_contents
    return ExpertsRecipe(interface=interface, grouped=learn().grouped, relies_on=relies_on)


def run_experts(recipe: ExpertsRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 3 or not _matches(recipe, module, *arguments):
        return NotImplemented
    gate_up, down = module.gate_up_proj, module.down_proj
    if torch.compiler.is_compiling():
        wins = bool(_may_group())
    else:
        tokens, index, _ = arguments
        engine = current()
        if engine is None:
            return NotImplemented
        products = [_product(tokens, index.numel(), weight) for weight in (gate_up, down)]
        wins = any(engine.plan(form, a, b, groups=groups) for form, a, b, groups in products)
        if not wins and all(engine.lacks(*product) for product in products):
            return LEFT
    return computed(Operands(*arguments, gate_up, down)) if wins else NotImplemented


def _matches(recipe: ExpertsRecipe, module: Any, tokens: Any, index: Any, shares: Any) -> bool:
    """Whether the layer still matches its recipe, and kernels may have its operands."""
    config: Any = module.config
    name = config._experts_implementation
    if name not in _PLAIN or not _is_replaceable(module):
        return False
    if recipe.interface.get(name) is not (recipe.grouped if name == "grouped_mm" else None):
        return False
    operands = (tokens, index, shares, module.gate_up_proj, module.down_proj)
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return False
    if recording.is_recording() or torch.is_autocast_enabled(tokens.device.type):
        return False
    return ours(*operands) and refusal(*operands) is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_group() -> bool:
    """Whether there are winners of grouped products, of any size: a tracer has no sizes."""
    engine = current()
    return engine is not None and may_run(engine, lambda problem: problem.operation.is_grouped)


def _product(
    tokens: torch.Tensor, rows: int, weight: torch.Tensor
) -> tuple[Form, Spec, torch.Tensor, int]:
    """A grouped product of the layer's forward pass, as `Engine.lacks` takes it."""
    a = Spec(tokens.dtype, tokens.device, (rows, weight.shape[-1]), (weight.shape[-1], 1))
    return Form.GROUPED, a, weight.detach().mT, weight.shape[0]


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the experts' outputs for each token.

    The same as transformers' `grouped_mm_experts_forward`.

    Args:
        module: the experts, a class with transformers' decorator `use_experts_implementation` of
            release 5.17.
        hidden_states: the tokens, [T, width].
        top_k_index: [T, chosen], numbers of experts. Numbers from `module.num_experts` on are
            experts of other ranks, and contribute nothing.
        top_k_weights: [T, chosen], factors of the experts' outputs.

    Returns:
        [T, width], of the tokens' type.
    """
    if _is_replaceable(module) and not torch.is_autocast_enabled(hidden_states.device.type):
        return experts(
            hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
        )
    number, order = top_k_index.flatten().sort()
    last = torch.arange(module.num_experts, device=number.device)
    offsets = torch.searchsorted(number, last, right=True, out_int32=True)
    # A grouped product does not write the rows after the last offset, neither in the forward nor in
    # the backward pass. They may hold NaN, so the masks keep them out of the sums that follow.
    others = (number >= module.num_experts)[:, None]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        d = grouped_mm(rows, weight if module.is_transposed else weight.mT, offsets)
        if module.has_bias:
            d = d + getattr(module, f"{name}_bias")[number.clamp(max=len(last) - 1)]
        return d.masked_fill(others, 0)

    rows = hidden_states[order // top_k_index.shape[-1]].masked_fill(others, 0)
    if module.has_gate:
        hidden = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(product(rows, "up_proj"))
    weighted = product(hidden, "down_proj") * top_k_weights.flatten()[order, None]
    by_token = weighted[order.argsort()].view(*top_k_index.shape, -1)
    return by_token.sum(dim=1).to(hidden_states.dtype)


class _Known(NamedTuple):
    """The functions and classes of transformers' SwiGLU experts. They differ between releases.

    Attributes:
        gate: the method that multiplies the activated gate with up.
        activations: classes that compute SiLU.
        calls: the functions that the experts call.
        grouped: the implementation `grouped_mm`.
    """

    gate: Any
    activations: tuple[type, ...]
    calls: tuple[tuple[Any, str], ...]
    grouped: Any


_known: _Known | None = None


def learn() -> _Known:
    """Look up transformers' functions once. Must run before tracing, which cannot import them."""
    global _known
    if _known is None:
        from transformers.activations import SiLUActivation
        from transformers.integrations import moe

        name = "grouped_mm_experts_forward"
        _known = _Known(
            gate=getattr(moe, "_default_apply_gate", None),  # private: it may be removed
            activations=(nn.SiLU, SiLUActivation),
            calls=((moe, "_default_apply_gate"), (moe, name), (functional, "silu")),
            grouped=getattr(moe, name, None),
        )
    return _known


def is_swiglu(module: Any) -> bool:
    """Whether `gemmsmith.experts` computes the same as these experts."""
    known = learn() if _known is None else _known
    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and type(module)._apply_gate is known.gate
        and "_apply_gate" not in module.__dict__
        and type(module.act_fn) in known.activations
        and module.gate_up_proj.dtype.itemsize == 2
    )


def _is_replaceable(module: Any) -> bool:
    """Whether the experts are SwiGLU, and their activation, without hooks, can be skipped."""
    return is_swiglu(module) and is_plain(module.act_fn) and has_no_global_hooks()
