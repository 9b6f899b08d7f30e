"""RMS norms of a patched model: one fused kernel of torch's in the place of six to eight steps.

The kernel is `torch.nn.functional.rms_norm`'s, with torch's backward pass or, where that is worth a
launch, ours (`gemmsmith.ops.products.norms`). It runs where winners run, while there are some in
use: without them a patch leaves every bit as it is. It rounds once, to the result; most models
round the normalized value and then the product. Both are within a step of the type of the exact
value. For operands that torch has no fused kernel for, and in compiled graphs, which Inductor fuses
itself, the module's own forward runs; `nn.RMSNorm`'s does too where its backward pass is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.originals import still
from gemmsmith.ops.products import norms
from gemmsmith.ops.products.registry import ours

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 2**32
"""Elements from which torch's fused kernel reads other rows: it counts them in 32 bits (2.11)."""


def kind_in_use() -> str | None:
    """The kind of device whose norms are replaced: winners run there; None: none are in use."""
    engine = current()
    if engine is None or not engine.may_run(lambda _: True):
        return None
    return engine.platform.kind


def run_norm(
    recipe: NormRecipe,
    module: Any,
    own: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """A patched norm's forward; see `gemmsmith.ops.models.forwards`."""
    if not named and len(arguments) == 1 and still(recipe.relies_on):
        weight = _suitable(recipe, module, *arguments)
        if weight is not None:
            return _computed(recipe, module, arguments[0], weight)
    return own(module, *arguments, **named)


def _computed(
    recipe: NormRecipe, module: Any, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    epsilon: float | None = getattr(module, recipe.epsilon)
    if not recipe.adds_one:
        return norms.rms_norm(x, weight, epsilon)
    # In bf16 the sum would lose bits, and an FP32 weight has a fused kernel for FP32 alone.
    scale = 1.0 + weight.float()
    return norms.rms_norm(x.float(), scale, epsilon).type_as(x)


def _suitable(recipe: NormRecipe, module: Any, x: Any) -> torch.Tensor | None:
    """The weight, if torch's fused kernel computes what the module would."""
    if torch.compiler.is_compiling():
        return None
    kind = kind_in_use()
    if kind is None or not isinstance(x, torch.Tensor) or x.device.type != kind:
        return None
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or not ours(x, weight):
        return None
    if recipe.is_fused and not norms.is_ours(x, weight):
        return None
    suits = (
        x.dtype is weight.dtype
        and x.dtype in _TYPES
        and weight.dim() == 1
        and x.shape[-1:] == weight.shape
        # The kernel's result always is, and what views it later may count on strides.
        and x.is_contiguous()
        and 0 < x.numel() < MOST
        and _has_epsilon(recipe, module)
        and (recipe.scales is None or getattr(module, recipe.scales) is True)
        and not torch.is_autocast_enabled(kind)
    )
    return weight if suits else None


def _has_epsilon(recipe: NormRecipe, module: Any) -> bool:
    epsilon = getattr(module, recipe.epsilon)
    return type(epsilon) is float or (epsilon is None and isinstance(module, nn.RMSNorm))
