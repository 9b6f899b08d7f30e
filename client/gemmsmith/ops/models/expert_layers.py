"""transformers' mixtures of experts in a patched model: their experts by `gemmsmith.experts`.

Known by the very function that transformers puts in the place of their forward, which chooses an
implementation by name. Where the model has one of transformers' plain ones, experts that are SwiGLU
without biases are computed by `gemmsmith.experts`, as by the implementation `gemmsmith`
(`experts_forward`), if one of their grouped products has a winner; the model's configuration is not
touched. They run their own forward where a hook would be passed by, and where a program has
replaced what they consist of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.models.forwards import is_plain, is_unheard
from gemmsmith.ops.models.originals import Original, originals, still
from gemmsmith.ops.products import recording
from gemmsmith.ops.products.grouped import grouped_mm
from gemmsmith.ops.products.mixture import computed, experts, refusal
from gemmsmith.ops.products.registry import ours

_FORWARD = (
    "transformers.integrations.moe",
    "use_experts_implementation.<locals>.wrapper.<locals>.forward",
)
_PLAIN = ("eager", "grouped_mm")
"""Implementations that nobody chooses for speed: transformers' defaults."""


@dataclass(frozen=True, kw_only=True)
class ExpertsRecipe:
    """Experts [E, 2 * I, K] and [E, K, I] of a routed layer.

    Attributes:
        interface: transformers' implementations by name.
        grouped: the one called `grouped_mm`; `eager` is the layer's own forward, and not in there.
        relies_on: functions that must be the originals.
    """

    interface: Any
    grouped: Any
    relies_on: tuple[Original, ...]

    def __str__(self) -> str:
        return "experts"


def experts_recipe(module: nn.Module) -> ExpertsRecipe | None:
    """What the module is known to compute; None: nothing that is taken over."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    # The wrapper wears the name of what it wraps; its code and its globals are its own.
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


def run_experts(
    recipe: ExpertsRecipe,
    module: Any,
    own: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Patched experts' forward; see `gemmsmith.ops.models.forwards`."""
    if not named and len(arguments) == 3 and _pays(recipe, module, *arguments):
        return computed(*arguments, module.gate_up_proj, module.down_proj)
    return own(module, *arguments, **named)


def _pays(recipe: ExpertsRecipe, module: Any, tokens: Any, index: Any, shares: Any) -> bool:
    """Whether the layer is as it was found, and one of its products has a winner."""
    config: Any = module.config
    name = config._experts_implementation
    if name not in _PLAIN or not _is_passed_by(module) or not still(recipe.relies_on):
        return False
    if recipe.interface.get(name) is not (recipe.grouped if name == "grouped_mm" else None):
        return False
    opened, down = module.gate_up_proj, module.down_proj
    operands = (tokens, index, shares, opened, down)
    if not all(isinstance(operand, torch.Tensor) for operand in operands):
        return False
    if recording.is_recording() or torch.is_autocast_enabled(tokens.device.type):
        return False
    if not ours(*operands) or refusal(*operands) is not None:
        return False
    if torch.compiler.is_compiling():
        return bool(_may_group())
    return _has_winner(tokens, index.numel(), opened, down)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_group() -> bool:
    """Whether there are winners of grouped products; which sizes have one, a tracer cannot ask."""
    engine = current()
    return engine is not None and engine.may_run(lambda operation: operation.is_grouped)


def _has_winner(tokens: torch.Tensor, rows: int, opened: torch.Tensor, down: torch.Tensor) -> bool:
    engine = current()
    if engine is None:
        return False
    return any(
        engine.plan(
            Form.GROUPED,
            Spec(tokens.dtype, tokens.device, (rows, weight.shape[-1]), (weight.shape[-1], 1)),
            weight.detach().mT,
            groups=weight.shape[0],
        )
        is not None
        for weight in (opened, down)
    )


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What experts make of tokens, as transformers' `grouped_mm_experts_forward`.

    Args:
        module: the experts, a class under transformers' `use_experts_implementation` of 5.17.
        hidden_states: [T, width].
        top_k_index: [T, chosen], experts' numbers; from `module.num_experts` on they are those of
            other ranks, and add nothing.
        top_k_weights: [T, chosen], what each of them counts for.

    Returns:
        [T, width], of the tokens' type.
    """
    if _is_passed_by(module) and not torch.is_autocast_enabled(hidden_states.device.type):
        return experts(
            hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
        )
    number, order = top_k_index.flatten().sort()
    last = torch.arange(module.num_experts, device=number.device)
    ends = torch.searchsorted(number, last, right=True, out_int32=True)
    # Rows after the last end are left as the memory was, forwards and backwards: each mask keeps
    # what may be no number out of the sums behind it, or before it in the backward pass.
    others = (number >= module.num_experts)[:, None]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        out = grouped_mm(rows, weight if module.is_transposed else weight.mT, ends)
        if module.has_bias:
            out = out + getattr(module, f"{name}_bias")[number.clamp(max=len(last) - 1)]
        return out.masked_fill(others, 0)

    rows = hidden_states[order // top_k_index.shape[-1]].masked_fill(others, 0)
    if module.has_gate:
        hidden = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(product(rows, "up_proj"))
    shared = product(hidden, "down_proj") * top_k_weights.flatten()[order, None]
    found = shared[order.argsort()].view(*top_k_index.shape, -1)
    return found.sum(dim=1).to(hidden_states.dtype)


class _Known(NamedTuple):
    """Of transformers, which may change: what stands for SwiGLU in a layer of experts.

    Attributes:
        gate: what multiplies the activated gate with up.
        activations: classes that compute SiLU.
        calls: the functions that all of this consists of.
        grouped: the implementation `grouped_mm`.
    """

    gate: Any
    activations: tuple[type, ...]
    calls: tuple[tuple[Any, str], ...]
    grouped: Any


_known: _Known | None = None


def learn() -> _Known:
    """Look it up once, before anything is traced: imports of lazy modules cannot be."""
    global _known
    if _known is None:
        from transformers.activations import SiLUActivation
        from transformers.integrations import moe

        name = "grouped_mm_experts_forward"
        _known = _Known(
            gate=getattr(moe, "_default_apply_gate", None),  # not public: it may go
            activations=(nn.SiLU, SiLUActivation),
            calls=((moe, "_default_apply_gate"), (moe, name), (functional, "silu")),
            grouped=getattr(moe, name, None),
        )
    return _known


def is_swiglu(module: Any) -> bool:
    """Whether `gemmsmith.experts` computes what the experts do."""
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


def _is_passed_by(module: Any) -> bool:
    """Whether they are SwiGLU, and nothing listens to the activation that is not called then."""
    return is_swiglu(module) and is_plain(module.act_fn) and is_unheard()
