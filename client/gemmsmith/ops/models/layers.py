"""The forwards of a patched model's layers: a product and what follows it by one kernel.

Each asks at every call whether a winner runs this very product with all that follows; if none does,
the module's own forward runs, untouched. It does so too where a child that would be passed by has
hooks or is no plain layer by now, where a dropout in between drops, and for operands that are not
torch's own tensors. While a graph is traced, an operator of ours goes into it that becomes torch's
own steps where no kernel wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from gemmsmith.ops.models import fusing
from gemmsmith.ops.models.expert_layers import ExpertsLayer, ExpertsRecipe
from gemmsmith.ops.models.norm_layers import NormLayer
from gemmsmith.ops.models.norms import NormRecipe
from gemmsmith.ops.models.recipes import (
    FeedForwardRecipe,
    First,
    Recipe,
    ResidualRecipe,
    SequenceRecipe,
    is_linear,
    is_plain,
    recipes,
    weight_of,
)
from gemmsmith.ops.models.swapping import Swapped, class_for


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

    @property
    def swapped_class(self) -> type[nn.Module]:
        """What it is while it is patched."""
        return class_for(type(self.module), _FORWARDS[type(self.recipe)], self.recipe)

    def __str__(self) -> str:
        return f"{type(self.module).__name__} ({self.recipe})"


def recognized(model: nn.Module) -> Iterator[Recognized]:
    """The modules of a model that a patch takes over."""
    for name, module, recipe in recipes(model):
        yield Recognized(name=name, module=module, recipe=recipe)


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
    if type(applied) is not first.kind:
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
        whole = fusing.mlp(
            *(x, weight, raised, layer.bias, weight_of(down), down.bias, first.activation),
            is_gated=is_gated,
        )
        if whole is not None:
            return whole, count
    if is_gated:
        return fusing.gated(x, weight, raised, layer.bias, first.activation), 0
    return fusing.linear(x, weight, layer.bias, first.activation), 0


class Layer(Swapped):
    """Tries to compute a part by one kernel, and goes on from there, or leaves all to the class."""

    def forward(self, *given: Any, **named: Any) -> Any:
        """As the module's own forward."""
        if self.is_swapped and not named and fusing.may_fuse(given):
            hidden, count = self._part(*given)
            if hidden is not None:
                for name in self.recipe.then[count:]:
                    hidden = getattr(self, name)(hidden)
                return hidden
        return super().forward(*given) if not named else super().forward(*given, **named)

    def _part(self, *given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        """What was computed, None where nothing was, and of `then` how many are done with."""
        raise NotImplementedError


class FeedForwardLayer(Layer):
    """See `FeedForwardRecipe`."""

    recipe: ClassVar[FeedForwardRecipe]

    def _part(self, *given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        recipe, first, up = self.recipe, self.recipe.first, None
        layer = getattr(self, first.layer)
        if len(given) != 1 or not _is_ready(layer) or not _applies(self, first):
            return None, 0
        if recipe.up is not None:
            up = getattr(self, recipe.up)
            # Two biases are two tensors, which no kernel takes.
            if not _is_ready(up) or layer.bias is not None or up.bias is not None:
                return None, 0
        following = [getattr(self, name) for name in recipe.then]
        return _computed(given[0], first, layer, up, following, is_gated=recipe.is_gated)


class ResidualLayer(Layer):
    """See `ResidualRecipe`."""

    recipe: ClassVar[ResidualRecipe]

    def _part(self, *given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        layer, dropout = getattr(self, self.recipe.layer), self.recipe.dropout
        if len(given) != 2 or not _is_ready(layer):
            return None, 0
        if dropout is not None and _drops(getattr(self, dropout)):
            return None, 0
        x, residual = given
        return fusing.linear(x, weight_of(layer), layer.bias, residual=residual), 0


class SequenceLayer(Swapped):
    """See `SequenceRecipe`: pairs by one kernel, or with the layer after them; all else as ever."""

    recipe: ClassVar[SequenceRecipe]

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """As `nn.Sequential`."""
        if not self.is_swapped:
            return super().forward(input)
        pairs = {one.layer: one for one in self.recipe.pairs}
        children: dict[str, Any] = self._modules
        names, at = list(children), 0
        while at < len(names):
            hidden, count, name = None, 0, names[at]
            if name in pairs:
                # A layer with an activation of its own is left to its own kernel. By a loop:
                # torch 2.11 does not compile `takewhile`.
                rest = []
                for one in names[at + 2 :]:
                    if one in pairs:
                        break
                    rest.append(children[one])
                hidden, count = self._pair(pairs[name], children[name], input, rest)
            if hidden is None:
                input, at = children[name](input), at + 1  # noqa: A001
            else:
                input, at = hidden, at + 2 + count  # noqa: A001
        return input

    def _pair(
        self, pair: First, layer: Any, given: Any, following: list[nn.Module]
    ) -> tuple[torch.Tensor | None, int]:
        if not fusing.may_fuse((given,)) or not _is_ready(layer) or not _applies(self, pair):
            return None, 0
        return _computed(given, pair, layer, None, following, is_gated=False)


_FORWARDS: dict[type, type[Swapped]] = {
    FeedForwardRecipe: FeedForwardLayer,
    ResidualRecipe: ResidualLayer,
    SequenceRecipe: SequenceLayer,
    ExpertsRecipe: ExpertsLayer,
    NormRecipe: NormLayer,
}
