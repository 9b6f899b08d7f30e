"""transformers' mixtures of experts in a patched model: their experts by `gemmsmith.experts`.

Known by the very function that transformers puts in the place of their forward, which chooses an
implementation by name. Where the model has one of transformers' plain ones, experts that are SwiGLU
without biases run as the implementation `gemmsmith` does (`gemmsmith.integrations.transformers`),
if one of their grouped products has a winner; the model's configuration is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemmsmith.ops import fused
from gemmsmith.ops.engine import current
from gemmsmith.ops.forms import Form, Spec
from gemmsmith.ops.registry import ours
from gemmsmith.ops.swapping import Swapped

_FORWARD = (
    "transformers.integrations.moe",
    "use_experts_implementation.<locals>.wrapper.<locals>.forward",
)
_PLAIN = ("eager", "grouped_mm")
"""Implementations that nobody chooses for speed: transformers' defaults."""


@dataclass(frozen=True, kw_only=True)
class ExpertsRecipe:
    """Experts [E, 2 * I, K] and [E, K, I] of a routed layer."""

    def __str__(self) -> str:
        return "experts"


def experts_recipe(module: nn.Module) -> ExpertsRecipe | None:
    """What the module is known to compute; None: nothing that is taken over."""
    forward: Any = type(module).forward
    code = getattr(forward, "__code__", None)
    # The wrapper wears the name of what it wraps; its code and its globals are its own.
    if code is None or code.co_qualname != _FORWARD[1]:
        return None
    if forward.__globals__.get("__name__") != _FORWARD[0]:
        return None
    from gemmsmith.integrations.transformers import is_swiglu

    return ExpertsRecipe() if is_swiglu(module) else None


class ExpertsLayer(Swapped):
    """See `ExpertsRecipe`."""

    def forward(self, *given: Any, **named: Any) -> Any:
        """As the module's own forward."""
        if self.is_swapped and not named and len(given) == 3 and self._pays(*given):
            from gemmsmith.integrations.transformers import experts_forward

            return experts_forward(self, *given)
        return super().forward(*given, **named)

    def _pays(self, tokens: Any, index: Any, shares: Any) -> bool:
        """Whether the layer is as it was found, and one of its products has a winner."""
        from gemmsmith.integrations.transformers import is_swiglu

        config: Any = self.config
        if not is_swiglu(self) or config._experts_implementation not in _PLAIN:
            return False
        if any(not isinstance(one, torch.Tensor) for one in (tokens, index, shares)):
            return False
        if fused.is_told() or torch.is_autocast_enabled(tokens.device.type):
            return False
        opened, down = self.gate_up_proj, self.down_proj
        if not (isinstance(opened, torch.Tensor) and isinstance(down, torch.Tensor)):
            return False
        if not ours(tokens, opened) or not ours(tokens, down) or tokens.dim() != 2:
            return False
        if torch.compiler.is_compiling():
            return bool(_may_group())
        return _has_winner(tokens, index.numel(), opened, down)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_group() -> bool:
    """Whether there are winners of grouped products; which sizes have one, a tracer cannot ask."""
    engine = current()
    return engine is not None and engine.may_group


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
