"""RMS norms of a patched model: a fused kernel of torch replaces six to eight operators.

torch's own module is recognized, and classes of models by the source of their `forward`. It must be
equal to a form below, except for the names of variables and of the attribute that holds epsilon.

The kernel is that of `torch.nn.functional.rms_norm`, with torch's backward pass or with ours if the
norm is large enough (`gemmsmith.ops.products.norms`). It is used only while winners are in use;
without winners, a patch does not change any bit. The kernel rounds only the result, while most
models round the normalized value and then the product. Both results differ from the exact value by
at most a unit in the last place. The module's own forward runs if torch has no fused kernel for
the operands, in compiled graphs, which Inductor fuses itself, and for `nn.RMSNorm` if torch's
backward pass would run anyway.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.models.canonical import OfModule
from gemmsmith.ops.models.forwards import LEFT, OWN_WEIGHT, DependsOn
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.models.reading import parsed
from gemmsmith.ops.products import norms
from gemmsmith.ops.products.registry import ours

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST = 2**32
"""Number of elements from which torch's fused kernel (2.11) reads wrong rows: its 32-bit index
overflows."""


@dataclass(frozen=True, kw_only=True)
class NormRecipe:
    """`x / sqrt(mean(x²) + epsilon) * weight`, over the last dimension.

    Attributes:
        epsilon: name of the attribute that holds epsilon.
        scales: name of an attribute that must be true, because otherwise the weight is not used;
            None if there is no such attribute.
        adds_one: whether 1 is added to the weight, in FP32.
        is_fused: whether the module itself runs torch's fused kernel, so that only the backward
            pass can become faster.
        relies_on: functions that must be the originals.
        depends_on: as of `forwards.Recipe`.
    """

    epsilon: str
    scales: str | None = None
    adds_one: bool = False
    is_fused: bool = False
    relies_on: tuple[Original, ...] = ()
    depends_on: DependsOn = OWN_WEIGHT

    def __str__(self) -> str:
        return "rms norm"


_LLAMA = """
def forward(self, x):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.eps)
    return {}
"""
_META = """
def forward(self, x):
    out = self._norm(x.float()).type_as(x)
    return out * self.weight
"""
_MOSHI = """
def forward(self, x):
    out = self._norm(x.float())
    out = out * self.weight.float()
    return out.type_as(x)
"""
_GEMMA = """
def forward(self, x):
    out = self._norm(x.float())
    out = out * (1.0 + self.weight.float())
    return out.type_as(x)
"""
_GEMMA4 = """
def forward(self, x):
    out = self._norm(x.float())
    if self.with_scale:
        out = out * self.weight.float()
    return out.type_as(x)
"""
_NORM = """
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
"""
_NORM_BY_POWER = """
def _norm(self, x):
    mean_squared = x.pow(2).mean(-1, keepdim=True) + self.eps
    return x * torch.pow(mean_squared, -0.5)
"""
_FORMS = (
    (_LLAMA.format("self.weight * x.to(dtype)"), None),
    (_LLAMA.format("(self.weight * x).to(dtype)"), None),  # OLMo 2
    (_LLAMA.format("(self.weight.to(torch.float32) * x).to(dtype)"), None),  # Helium
    (_META, _NORM),  # the first Llama, and Llama 4
    (_MOSHI, _NORM),
    (_GEMMA, _NORM),  # 1 to 3
    (_GEMMA4, _NORM_BY_POWER),
)
"""The source of `forward`, and that of the method `_norm` if `forward` calls it."""

_WRITTEN_WITH = ((torch, "rsqrt"), (torch, "pow"), (torch.Tensor, "pow"), (torch.Tensor, "mean"))
"""The functions of torch that the forms call."""

_KEPT = ("weight", "_norm", "with_scale")
"""Attributes of the module that must have exactly these names."""


def _written(source: str) -> str:
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.FunctionDef)  # noqa: S101 - the source is a form above
    return OfModule(tree, _KEPT).text()


_KNOWN = {_written(forward): norm and _written(norm) for forward, norm in _FORMS}
_ADDS_ONE = _written(_GEMMA)


def _text(function: object, others: set[str]) -> str | None:
    """The canonical text of a function; None if its source or its names' meaning is not known.

    Adds the other attributes of the module that the function uses to `others`.
    """
    tree = parsed(function)
    if tree is None or tree.decorator_list or not isinstance(function, FunctionType):
        return None
    if function.__closure__ or function.__globals__.get("torch", torch) is not torch:
        return None
    canonical = OfModule(tree, _KEPT)
    text = canonical.text()
    others.update(canonical.attributes)
    return text


@functools.cache
def _recipe(forward: Callable[..., Any], norm: object) -> NormRecipe | None:
    """The recipe for a class's `forward` and `_norm`; None if they are not a known form."""
    others: set[str] = set()
    text = _text(forward, others)
    if text is None or text not in _KNOWN:
        return None
    inner = _KNOWN[text]
    if (inner is not None and _text(norm, others) != inner) or len(others) != 1:
        return None
    scales = "with_scale" if "with_scale" in text else None
    return NormRecipe(epsilon=others.pop(), scales=scales, adds_one=text == _ADDS_ONE)


def norm_recipe(module: nn.Module) -> NormRecipe | None:
    """The recipe of a norm; None if the module is not recognized."""
    weight, kind = module._parameters.get("weight"), type(module)
    if weight is None or weight.dim() != 1 or module._modules or "_norm" in module.__dict__:
        return None
    if kind.forward is nn.RMSNorm.forward:
        recipe: NormRecipe | None = NormRecipe(epsilon="eps", is_fused=True)
        relies_on = originals((nn.RMSNorm, "forward"), (functional, "rms_norm"))
    else:
        recipe = _recipe(kind.forward, getattr(kind, "_norm", None))
        relies_on = originals(*_WRITTEN_WITH)
        if relies_on is not None and hasattr(kind, "_norm"):
            relies_on = (*relies_on, Original(kind, "_norm", kind._norm))
    return None if recipe is None or relies_on is None else replace(recipe, relies_on=relies_on)


def kind_in_use() -> str | None:
    """The type of device for which winners are in use; None if no winners are in use."""
    engine = current()
    return engine.platform.kind if engine is not None and has_winners(engine) else None


def has_winners(engine: Engine) -> bool:
    rows = getattr(engine.snapshot, "rows", None)
    return rows is None or len(rows) > 0


def run_norm(recipe: NormRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling() or len(arguments) != 1:
        return NotImplemented
    (x,), weight = arguments, module.weight
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return NotImplemented
    kind = kind_in_use()
    if x.device.type != kind or (recipe.is_fused and not norms.is_ours(x, weight)):
        return LEFT
    if not _suits(recipe, module, x, weight):
        return NotImplemented
    return _run_fused(recipe, module, x, weight)


def _run_fused(
    recipe: NormRecipe, module: Any, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    epsilon: float | None = getattr(module, recipe.epsilon)
    if not recipe.adds_one:
        return norms.rms_norm(x, weight, epsilon)
    # The sum needs FP32, and torch's fused kernel needs the same type for x and the weight.
    scale = 1.0 + weight.float()
    return norms.rms_norm(x.float(), scale, epsilon).type_as(x)


def _suits(recipe: NormRecipe, module: Any, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's fused kernel computes the same as the module."""
    return (
        ours(x, weight)
        and x.dtype is weight.dtype
        and x.dtype in _TYPES
        and weight.dim() == 1
        and x.shape[-1:] == weight.shape
        # The kernel's result is contiguous. That of the module has x's strides, which a later view
        # may depend on.
        and x.is_contiguous()
        and 0 < x.numel() < MOST
        and _has_epsilon(recipe, module)
        and (recipe.scales is None or getattr(module, recipe.scales) is True)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _has_epsilon(recipe: NormRecipe, module: Any) -> bool:
    epsilon = getattr(module, recipe.epsilon)
    return type(epsilon) is float or (epsilon is None and isinstance(module, nn.RMSNorm))
