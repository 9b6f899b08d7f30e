"""The forwards of a patched model's layers: a product and what follows it by one kernel.

Each asks at every call whether a winner runs this very product with all that follows; if none does,
the module's own forward runs, untouched. It does so too where a child that would be passed by has
hooks or is no plain layer by now, where a dropout in between drops, and for operands that are not
torch's own tensors. While a graph is traced, an operator of ours goes into it that becomes torch's
own steps where no kernel wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from gemmsmith.ops import fusing
from gemmsmith.ops.expert_layers import ExpertsLayer, ExpertsRecipe
from gemmsmith.ops.recipes import (
    ActivationRecipe,
    First,
    GateRecipe,
    Recipe,
    ResidualRecipe,
    SequenceRecipe,
    is_linear,
    is_plain,
    recipes,
    weight_of,
)
from gemmsmith.ops.swapping import Swapped, class_for


@dataclass(frozen=True, kw_only=True)
class Recognized:
    """A module that may run fused products.

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


class Layer(Swapped):
    """Tries to compute a part by one kernel, and goes on from there, or leaves all to the class."""

    def forward(self, *given: Any, **named: Any) -> Any:
        """As the module's own forward."""
        if self.is_swapped and not named and fusing.may_fuse(given):
            hidden = self._part(*given)
            if hidden is not None:
                for name in self.recipe.then:
                    hidden = getattr(self, name)(hidden)
                return hidden
        return super().forward(*given) if not named else super().forward(*given, **named)

    def _part(self, *given: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError


class ActivationLayer(Layer):
    """See `ActivationRecipe`."""

    recipe: ClassVar[ActivationRecipe]

    def _part(self, *given: torch.Tensor) -> torch.Tensor | None:
        first = self.recipe.first
        layer = getattr(self, first.layer)
        if len(given) != 1 or not _is_ready(layer) or not _applies(self, first):
            return None
        return fusing.linear(given[0], weight_of(layer), layer.bias, first.activation)


class GateLayer(Layer):
    """See `GateRecipe`."""

    recipe: ClassVar[GateRecipe]

    def _part(self, *given: torch.Tensor) -> torch.Tensor | None:
        first, up = self.recipe.first, self.recipe.up
        layer = getattr(self, first.layer)
        if len(given) != 1 or not _is_ready(layer) or not _applies(self, first):
            return None
        if up is None:
            weight = weight_of(layer)
            return fusing.gated(given[0], weight, None, layer.bias, first.activation)
        other = getattr(self, up)
        # Two biases are two tensors, which no kernel takes.
        if not _is_ready(other) or layer.bias is not None or other.bias is not None:
            return None
        return fusing.gated(given[0], weight_of(layer), weight_of(other), None, first.activation)


class ResidualLayer(Layer):
    """See `ResidualRecipe`."""

    recipe: ClassVar[ResidualRecipe]

    def _part(self, *given: torch.Tensor) -> torch.Tensor | None:
        layer = getattr(self, self.recipe.layer)
        if len(given) != 2 or not _is_ready(layer) or not self._keeps_all():
            return None
        x, residual = given
        return fusing.linear(x, weight_of(layer), layer.bias, residual=residual)

    def _keeps_all(self) -> bool:
        """Whether nothing is dropped between the product and the sum, by a module or a hook."""
        if self.recipe.dropout is None:
            return True
        dropout = getattr(self, self.recipe.dropout)
        inactive = type(dropout) is nn.Identity or (
            type(dropout) is nn.Dropout and (dropout.p == 0 or not dropout.training)
        )
        return inactive and is_plain(dropout)


class SequenceLayer(Swapped):
    """See `SequenceRecipe`: each pair by one kernel, all else as ever."""

    recipe: ClassVar[SequenceRecipe]

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """As `nn.Sequential`."""
        if not self.is_swapped:
            return super().forward(input)
        pairs = {one.layer: one for one in self.recipe.pairs}
        children: dict[str, Any] = self._modules
        passed_by = None
        for name, module in children.items():
            if name == passed_by:
                continue
            hidden = None
            if name in pairs:
                hidden = self._pair(pairs[name], module, input)
            if hidden is None:
                input = module(input)  # noqa: A001
            else:
                input, passed_by = hidden, pairs[name].by  # noqa: A001
        return input

    def _pair(self, pair: First, layer: Any, given: Any) -> torch.Tensor | None:
        if not fusing.may_fuse((given,)) or not _is_ready(layer) or not _applies(self, pair):
            return None
        return fusing.linear(given, weight_of(layer), layer.bias, pair.activation)


_FORWARDS: dict[type, type[Swapped]] = {
    ActivationRecipe: ActivationLayer,
    GateRecipe: GateLayer,
    ResidualRecipe: ResidualLayer,
    SequenceRecipe: SequenceLayer,
    ExpertsRecipe: ExpertsLayer,
}
