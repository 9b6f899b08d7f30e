"""The forwards of a patched model's layers: a product and what follows it by one kernel.

Each asks at every call whether a winner runs this very product with all that follows; if none does,
the module's own forward runs, untouched. It does so too where a child that would be passed by has
hooks or is no plain layer by now, where a dropout in between drops, and for operands that are not
torch's own tensors. While a graph is traced, an operator of ours goes into it that becomes torch's
own steps where no kernel wins.
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
from gemmsmith.ops.models.norm_layers import run_norm
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.originals import still
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
        name: within the model.
        module: itself.
        recipe: what it computes.
    """

    name: str
    module: nn.Module
    recipe: Recipe

    def __str__(self) -> str:
        return f"{type(self.module).__name__} ({self.recipe})"


def recognized(model: nn.Module) -> Iterator[Recognized]:
    """The modules of a model that a patch takes over."""
    for name, module, recipe in recipes(model):
        yield Recognized(name=name, module=module, recipe=recipe)


def take_over(forwards: Forwards, layers: Iterable[Recognized]) -> None:
    """Patch modules."""
    for layer in layers:
        forwards.put(layer.module, _RUNS[type(layer.recipe)], layer.recipe)


def take_over_linear(forwards: Forwards, layers: Iterable[nn.Module]) -> None:
    """Patch linear layers, each by itself; those that are patched already stay as they are."""
    recipe = linear_recipe()
    for layer in layers if recipe is not None else ():
        forwards.put(layer, _linear, recipe)


def counts(found: list[Recognized]) -> Counter[str]:
    """How many of each kind there are."""
    return Counter(map(str, found))


def _is_ready(layer: object) -> bool:
    """Whether a linear layer's product may be computed past the layer."""
    return is_linear(layer) and isinstance(layer, nn.Module) and is_plain(layer)


def _applies(module: nn.Module, first: First) -> bool:
    """Whether the activation is still the one that was found, and nobody listens to it."""
    if first.by is None:
        return True
    applied = getattr(module, first.by, None)
    if type(applied) is not first.kind or activation_of(applied) is not first.activation:
        return False
    return not isinstance(applied, nn.Module) or is_plain(applied)


def _drops(dropout: object) -> bool:
    """Whether it does anything to its argument, or somebody listens to it."""
    if type(dropout) is nn.Dropout:
        return (dropout.training and dropout.p != 0) or not is_plain(dropout)
    return type(dropout) is not nn.Identity or not is_plain(dropout)


def second(following: Sequence[nn.Module]) -> tuple[Any, int]:
    """The layer that comes next, past dropouts that do nothing, and how many end with it."""
    for count, child in enumerate(following, 1):
        if _is_ready(child):
            return child, count
        if _drops(child):
            break
    return None, 0


def _computed(
    x: torch.Tensor,
    first: First,
    layer: Any,
    up: Any,
    following: Sequence[nn.Module],
    *,
    is_gated: bool,
) -> tuple[torch.Tensor | None, int]:
    """The activation's value, or what a layer after it makes of that, by kernels where they win.

    None where they do not; and how many of the children that follow are done with.
    """
    weight, raised = weight_of(layer), None if up is None else weight_of(up)
    down, count = second(following)
    if down is not None:
        call = feedforward.MlpCall(
            *(x, weight, weight_of(down), raised, layer.bias, down.bias, None, first.activation)
        )
        value, is_whole = fusing.feed_forward(call, is_gated=is_gated)
        return value, count if is_whole else 0
    if is_gated:
        return fusing.gate(gated.GatedCall(x, weight, raised, layer.bias, first.activation)), 0
    return fusing.linear(fused.LinearCall(x, weight, layer.bias, activation=first.activation)), 0


def _by_part(part: Part) -> Run:
    """Tries to compute a part by one kernel, and goes on from there, or leaves all to the class."""

    def run(
        recipe: Any,
        module: Any,
        own: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        if not named and fusing.may_fuse(arguments) and still(recipe.relies_on):
            hidden, count = part(recipe, module, *arguments)
            if hidden is not None:
                for name in recipe.then[count:]:
                    hidden = getattr(module, name)(hidden)
                return hidden
        return own(module, *arguments, **named)

    return run


Part = Callable[..., tuple[torch.Tensor | None, int]]
"""What was computed, None where nothing was, and of `then` how many are done with."""


def _feed_forward(
    recipe: FeedForwardRecipe, module: Any, *operands: torch.Tensor
) -> tuple[torch.Tensor | None, int]:
    first, up = recipe.first, None
    layer = getattr(module, first.layer)
    if len(operands) != 1 or not _is_ready(layer) or not _applies(module, first):
        return None, 0
    if recipe.up is not None:
        up = getattr(module, recipe.up)
        # Two biases are two tensors, which no kernel takes.
        if not _is_ready(up) or layer.bias is not None or up.bias is not None:
            return None, 0
    following = [getattr(module, name) for name in recipe.then]
    return _computed(operands[0], first, layer, up, following, is_gated=recipe.is_gated)


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


def _sequence(
    recipe: SequenceRecipe,
    module: Any,
    own: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Pairs by one kernel, or with the layer after them; all else as ever."""
    if named or len(arguments) != 1 or not still(recipe.relies_on):
        return own(module, *arguments, **named)
    (value,) = arguments
    pairs = {one.layer: one for one in recipe.pairs}
    children: dict[str, Any] = module._modules
    names, at = list(children), 0
    while at < len(names):
        hidden, count, name = None, 0, names[at]
        if name in pairs:
            # A layer with an activation of its own is left to its own kernel. By a loop:
            # torch 2.11 does not compile `takewhile`.
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
    return _computed(x, pair, layer, None, following, is_gated=False)


def _linear(
    recipe: LinearRecipe,
    module: Any,
    own: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    if named or len(arguments) != 1 or not still(recipe.relies_on):
        return own(module, *arguments, **named)
    return operators.linear(arguments[0], module.weight, module.bias)


_RUNS: dict[type, Run] = {
    FeedForwardRecipe: _by_part(_feed_forward),
    ResidualRecipe: _by_part(_residual),
    SequenceRecipe: _sequence,
    ExpertsRecipe: run_experts,
    NormRecipe: run_norm,
}
