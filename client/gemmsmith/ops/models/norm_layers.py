"""RMS norms of a patched model: a fused kernel of torch replaces six to eight operators.

The kernel is that of `torch.nn.functional.rms_norm`, with torch's backward pass or with ours if the
norm is large enough (`gemmsmith.ops.products.norms`). It is used only while winners are in use;
without winners, a patch does not change any bit. The kernel rounds only the result, while most
models round the normalized value and then the product. Both results differ from the exact value by
less than a unit in the last place. The module's own forward runs if torch has no fused kernel for
the operands, in compiled graphs, which Inductor fuses itself, and for `nn.RMSNorm` if torch's
backward pass would run anyway.
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
"""Number of elements from which torch's fused kernel (2.11) reads wrong rows: its 32-bit index
overflows."""


def kind_in_use() -> str | None:
    """The type of device for which winners are in use; None if no winners are in use."""
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
    """The forward of a patched norm; see `gemmsmith.ops.models.forwards`."""
    if not named and len(arguments) == 1 and still(recipe.relies_on):
        weight = _suitable(recipe, module, *arguments)
        if weight is not None:
            return _run_fused(recipe, module, arguments[0], weight)
    return own(module, *arguments, **named)


def _run_fused(
    recipe: NormRecipe, module: Any, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    epsilon: float | None = getattr(module, recipe.epsilon)
    if not recipe.adds_one:
        return norms.rms_norm(x, weight, epsilon)
    # The sum needs FP32, and torch's fused kernel needs the same type for x and the weight.
    scale = 1.0 + weight.float()
    return norms.rms_norm(x.float(), scale, epsilon).type_as(x)


def _suitable(recipe: NormRecipe, module: Any, x: Any) -> torch.Tensor | None:
    """The weight, if torch's fused kernel computes the same as the module; else None."""
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
        # The kernel's result is contiguous. That of the module has x's strides, which a later view
        # may depend on.
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
