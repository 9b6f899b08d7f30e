"""The forwards of a patched model's layers: a product and what follows it in a single kernel.

At every call, a layer looks for a winner that computes this product with everything that follows.
The module's own forward runs if there is no such winner, if a child that would be skipped has hooks
or is not a plain layer any more, if a dropout between them is active, and if the operands are not
plain torch tensors. In a traced graph, an operator of ours is used in any case; it runs torch's own
operators if no kernel won.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemmsmith.ops.models import fusing
from gemmsmith.ops.models.expert_layers import ExpertsRecipe, run_experts
from gemmsmith.ops.models.forwards import Forwards, Run, is_plain
from gemmsmith.ops.models.norms import NormRecipe, run_norm
from gemmsmith.ops.models.recipes import (
    FeedForwardRecipe,
    First,
    LinearRecipe,
    Recipe,
    ResidualRecipe,
    SequenceRecipe,
    activation_of,
    is_linear,
    linear_recipe,
    recipes,
    weight_of,
)
from gemmsmith.ops.products import feedforward, fused, gated, operators


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """A module that a patch takes over.

    Attributes:
        name: the module's name in the model.
        module: the module.
        recipe: what the module computes.
    """

    name: str
    module: nn.Module
    recipe: Recipe

    def __str__(self) -> str:
        return f"{type(self.module).__name__} ({self.recipe})"


def recognized(model: nn.Module) -> Iterator[Recognized]:
    for name, module, recipe in recipes(model):
        yield Recognized(name=name, module=module, recipe=recipe)


def take_over(forwards: Forwards, layers: Iterable[Recognized]) -> None:
    for layer in layers:
        forwards.put(layer.module, _RUNS[type(layer.recipe)], layer.recipe)


def take_over_linear(forwards: Forwards, layers: Iterable[nn.Module]) -> None:
    """Patch linear layers. Their products run alone, without what follows them."""
    recipe = linear_recipe()
    if recipe is not None:
        for layer in layers:
            forwards.put(layer, _linear, recipe)


def counts(layers: list[Recognized]) -> Counter[str]:
    return Counter(map(str, layers))


def _is_ready(layer: object) -> bool:
    """Whether this is a linear layer whose product may be computed without calling the layer."""
    return is_linear(layer) and isinstance(layer, nn.Module) and is_plain(layer)


def _applies(module: nn.Module, first: First) -> bool:
    """Whether the activation is unchanged and has no hooks."""
    if first.by is None:
        return True
    applied = getattr(module, first.by, None)
    if type(applied) is not first.kind or activation_of(applied) is not first.activation:
        return False
    return not isinstance(applied, nn.Module) or is_plain(applied)


def _drops(dropout: object) -> bool:
    """Whether a dropout must be called: it is active, has hooks, or is another kind of module."""
    if type(dropout) is nn.Dropout:
        return (dropout.training and dropout.p != 0) or not is_plain(dropout)
    return type(dropout) is not nn.Identity or not is_plain(dropout)


def second(following: Sequence[nn.Module]) -> tuple[Any, int]:
    """The next linear layer after inactive dropouts, and its position, counted from 1.

    Returns (None, 0) if another module comes first.
    """
    for count, child in enumerate(following, 1):
        if _is_ready(child):
            return child, count
        if _drops(child):
            break
    return None, 0


def _run_activated(
    x: torch.Tensor,
    first: First,
    layer: Any,
    up: Any,
    following: Sequence[nn.Module],
    *,
    is_gated: bool,
) -> tuple[torch.Tensor | None, int]:
    """A layer, its activation and possibly the layer after it, computed by kernels.

    Returns the value, or None if no kernel won, and the number of following children that it
    includes.
    """
    weight, up_weight = weight_of(layer), None if up is None else weight_of(up)
    down, count = second(following)
    if down is not None:
        call = feedforward.MlpCall(
            *(x, weight, weight_of(down), up_weight, layer.bias, down.bias, None, first.activation)
        )
        value, is_whole = fusing.feed_forward(call, is_gated=is_gated)
        return value, count if is_whole else 0
    if is_gated:
        return fusing.gate(gated.GatedCall(x, weight, up_weight, layer.bias, first.activation)), 0
    return fusing.linear(fused.LinearCall(x, weight, layer.bias, activation=first.activation)), 0


def _by_part(part: Part) -> Run:
    """Computes a part with kernels, then calls the remaining children."""

    def run(recipe: Any, module: Any, arguments: tuple[Any, ...]) -> Any:
        if not fusing.may_fuse(arguments):
            return NotImplemented
        hidden, count = part(recipe, module, *arguments)
        if hidden is None:
            return NotImplemented
        for name in recipe.then[count:]:
            hidden = getattr(module, name)(hidden)
        return hidden

    return run


Part = Callable[..., tuple[torch.Tensor | None, int]]
"""Computes a part of a module. Returns the value, or None if no kernel won, and the number of
children in `then` that it includes."""


def _feed_forward(
    recipe: FeedForwardRecipe, module: Any, *operands: torch.Tensor
) -> tuple[torch.Tensor | None, int]:
    first, up = recipe.first, None
    layer = getattr(module, first.layer)
    if len(operands) != 1 or not _is_ready(layer) or not _applies(module, first):
        return None, 0
    if recipe.up is not None:
        up = getattr(module, recipe.up)
        # Kernels with a gate do not add a bias.
        if not _is_ready(up) or layer.bias is not None or up.bias is not None:
            return None, 0
    following = [getattr(module, name) for name in recipe.then]
    return _run_activated(operands[0], first, layer, up, following, is_gated=recipe.is_gated)


def _residual(
    recipe: ResidualRecipe, module: Any, *operands: torch.Tensor
) -> tuple[torch.Tensor | None, int]:
    layer, dropout = getattr(module, recipe.layer), recipe.dropout
    if len(operands) != 2 or not _is_ready(layer):
        return None, 0
    if dropout is not None and _drops(getattr(module, dropout)):
        return None, 0
    x, residual = operands
    return fusing.linear(fused.LinearCall(x, weight_of(layer), layer.bias, residual)), 0


def _sequence(recipe: SequenceRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    """The forward of a `Sequential`: runs its pairs with kernels, and calls all other children."""
    if len(arguments) != 1:
        return NotImplemented
    (value,) = arguments
    pairs = {pair.layer: pair for pair in recipe.pairs}
    children: dict[str, Any] = module._modules
    names, at = list(children), 0
    while at < len(names):
        hidden, count, name = None, 0, names[at]
        if name in pairs:
            # The next layer with an activation runs its own kernel. This is a loop because torch
            # 2.11 does not compile `takewhile`.
            rest = []
            for following in names[at + 2 :]:
                if following in pairs:
                    break
                rest.append(children[following])
            hidden, count = _pair(module, pairs[name], children[name], value, rest)
        if hidden is None:
            value, at = children[name](value), at + 1
        else:
            value, at = hidden, at + 2 + count
    return value


def _pair(
    module: Any, pair: First, layer: Any, x: Any, following: list[nn.Module]
) -> tuple[torch.Tensor | None, int]:
    if not fusing.may_fuse((x,)) or not _is_ready(layer) or not _applies(module, pair):
        return None, 0
    return _run_activated(x, pair, layer, None, following, is_gated=False)


def _linear(_recipe: LinearRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 1:
        return NotImplemented
    return operators.linear(arguments[0], module.weight, module.bias)


_RUNS: dict[type, Run] = {
    FeedForwardRecipe: _by_part(_feed_forward),
    ResidualRecipe: _by_part(_residual),
    SequenceRecipe: _sequence,
    ExpertsRecipe: run_experts,
    NormRecipe: run_norm,
}
