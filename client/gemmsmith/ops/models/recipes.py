"""Recognizes the modules of a model that are patched: products with what follows, experts, norms.

A module is recognized by what the forward of its class computes (`gemmsmith.ops.models.reading`),
not by its name, and by the exact types of the children that are replaced. Subclasses with their own
forward are read like any other class. A module is not patched if the instance has its own forward,
if a child that would be skipped has hooks, if children are of other classes (quantized, adapted,
sharded), or if a program has replaced the forward, or a function of torch or transformers, before
or after the module was recognized (`gemmsmith.ops.models.originals`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemmsmith.core.epilogue import Activation
from gemmsmith.ops.models.expert_layers import ExpertsRecipe, experts_recipe
from gemmsmith.ops.models.forwards import NOTHING, OWN_WEIGHT, DependsOn, has_own_forward
from gemmsmith.ops.models.norms import NormRecipe, norm_recipe
from gemmsmith.ops.models.originals import Original, originals
from gemmsmith.ops.models.reading import Activated, Called, Combined, Expression, Given, Half, read
from gemmsmith.ops.products import losses
from gemmsmith.program.variables import defers_logits


@dataclass(frozen=True, kw_only=True)
class First:
    """A layer and the activation of its result.

    Attributes:
        layer: name of the child, or its position in a `Sequential`.
        activation: the activation.
        by: name or position of the child that applies the activation; None if a function of torch
            applies it.
        kind: class of that child.
    """

    layer: str
    activation: Activation
    by: str | None
    kind: type | None


@dataclass(frozen=True, kw_only=True)
class FeedForwardRecipe:
    """`then(activation(layer(x)))`, or `then(activation(gate(x)) * up(x))`: an MLP, or half of one.

    Attributes:
        first: the layer (with a gate, the gate's layer) and the activation.
        is_gated: whether the activation is multiplied by `up`.
        up: name of the layer of the other factor; None if both factors are halves of the result of
            the same layer.
        then: names of the children that are called after that, in this order.
        relies_on: functions that must be the originals.
        depends_on: as of `forwards.Recipe`.
    """

    first: First
    is_gated: bool
    up: str | None
    then: tuple[str, ...]
    relies_on: tuple[Original, ...] = ()
    depends_on: DependsOn = NOTHING

    def __str__(self) -> str:
        return f"{'gated' if self.is_gated else 'linear +'} {self.first.activation.value}"


@dataclass(frozen=True, kw_only=True)
class ResidualRecipe:
    """`then(dropout(layer(x)) + y)`. It is fused only while the dropout is inactive."""

    layer: str
    dropout: str | None
    then: tuple[str, ...]
    relies_on: tuple[Original, ...] = ()
    depends_on: DependsOn = NOTHING

    def __str__(self) -> str:
        return "linear + residual"


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe:
    """The layers of a `Sequential` that are followed by an activation.

    Attributes:
        pairs: the layers.
        relies_on: functions that must be the originals.
        depends_on: as of `forwards.Recipe`.
        is_sized: whether the sizes and types of all results follow from those of the operand.
    """

    pairs: tuple[First, ...]
    relies_on: tuple[Original, ...]
    depends_on: DependsOn
    is_sized: bool

    def __str__(self) -> str:
        return "linear + " + ", ".join(sorted({pair.activation.value for pair in self.pairs}))


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """A single linear layer whose product is not replaced below autograd.

    Attributes:
        relies_on: functions that must be the originals.
        is_bound: whether the products of its gradients are replaced there.
        depends_on: as of `forwards.Recipe`.
    """

    relies_on: tuple[Original, ...]
    is_bound: bool = False
    depends_on: DependsOn = OWN_WEIGHT

    def __str__(self) -> str:
        return "linear"


class HeadRecipe(LinearRecipe):
    """A linear layer with so many outputs that they may be logits before a loss."""

    def __str__(self) -> str:
        return "head, with the loss that follows"


Recipe = (
    FeedForwardRecipe | ResidualRecipe | SequenceRecipe | ExpertsRecipe | NormRecipe | LinearRecipe
)


_CONV1D = ("transformers.pytorch_utils", "Conv1D")
"""GPT-2's linear layer, whose weight is [K, N]."""

_TANH = ((torch, "tanh"), (torch, "pow"))
_OF_TRANSFORMERS: dict[str, tuple[Activation, tuple[tuple[Any, str], ...]]] = {
    "GELUActivation": (Activation.GELU, ((functional, "gelu"), (torch, "erf"))),
    "GELUTanh": (Activation.GELU_TANH, ((functional, "gelu"), *_TANH)),
    "NewGELUActivation": (Activation.GELU_TANH, _TANH),
    "FastGELUActivation": (Activation.GELU_TANH, _TANH),
    "AccurateGELUActivation": (Activation.GELU_TANH, _TANH),
    "SiLUActivation": (Activation.SILU, ((functional, "silu"),)),
    "ReLUSquaredActivation": (Activation.RELU2, ((functional, "relu"), (torch, "square"))),
}
"""Classes of `transformers.activations` by what they compute, and the functions they call."""


def is_linear(module: object) -> bool:
    """Whether the module multiplies by a weight and adds a bias, and does nothing else."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: object) -> bool:
    """Whether the module is a linear layer with a weight [K, N]."""
    return (type(module).__module__, type(module).__qualname__) == _CONV1D


def sizes_of(layer: Any) -> Iterator[tuple[int, int]]:
    """Extents of a linear layer's weight, in either order: of the whole, and of a local part."""
    for names in (("out_features", "in_features"), ("nf", "nx")):
        if all(hasattr(layer, name) for name in names):
            yield getattr(layer, names[0]), getattr(layer, names[1])
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        yield weight.shape[0], weight.shape[1]


def activation_of(applied: object) -> Activation | None:
    """The activation that a module or a function of torch computes; None if it is unknown."""
    if applied is functional.silu:
        return Activation.SILU
    if applied is functional.gelu:
        return Activation.GELU
    kind = type(applied)
    if kind is nn.SiLU:
        return Activation.SILU
    if isinstance(applied, nn.GELU) and kind is nn.GELU:
        return {"none": Activation.GELU, "tanh": Activation.GELU_TANH}.get(applied.approximate)
    if kind.__module__ == "transformers.activations" and kind.__qualname__ in _OF_TRANSFORMERS:
        # `act` is a function of torch, or a method that computes the same.
        act = getattr(applied, "act", None)
        if act is None or getattr(act, "func", act) is functional.gelu or _is_method(act, applied):
            return _OF_TRANSFORMERS[kind.__qualname__][0]
    return None


def _is_method(function: object, of: object) -> bool:
    name = getattr(function, "__name__", "")
    return getattr(function, "__self__", None) is of and getattr(of, name, None) == function


def _calls(module: object) -> tuple[tuple[Any, str], ...]:
    """The functions that a linear layer, an activation or a dropout calls."""
    kind = type(module)
    if module is functional.silu or module is functional.gelu:
        return ((functional, module.__name__),)
    if kind is nn.Linear:
        return (kind, "forward"), (functional, "linear")
    if kind is nn.GELU or kind is nn.SiLU or kind is nn.Dropout:
        return (kind, "forward"), (functional, kind.__name__.lower())
    if is_transposed(module):
        return (kind, "forward"), (torch, "addmm")
    if kind.__module__ == "transformers.activations":
        return (kind, "forward"), *_OF_TRANSFORMERS[kind.__qualname__][1]
    return ()


def _completed(
    recipe: FeedForwardRecipe | ResidualRecipe, module: nn.Module, relies_on: tuple[Original, ...]
) -> FeedForwardRecipe | ResidualRecipe | None:
    """The recipe, with all that it relies and depends on.

    Returns None if a function that a skipped child calls has been replaced.
    """
    if isinstance(recipe, ResidualRecipe):
        names = [recipe.layer, recipe.dropout]
    else:
        names = [recipe.first.layer, recipe.up, recipe.first.by, *recipe.then]
    children = [(name, getattr(module, name)) for name in names if name is not None]
    calls = originals(*dict.fromkeys(call for _, child in children for call in _calls(child)))
    if calls is None:
        return None
    return replace(recipe, relies_on=(*relies_on, *calls), depends_on=_depends_on(children))


def _depends_on(children: Iterable[tuple[str, object]]) -> DependsOn:
    return DependsOn(
        weights=tuple((name, "weight") for name, child in children if is_linear(child)),
        dropouts=tuple(name for name, child in children if type(child) is nn.Dropout),
    )


def recipe_of(module: nn.Module) -> Recipe | None:
    """The recipe of a module; None if the module is not recognized."""
    forward = type(module).forward
    if has_own_forward(module):
        return None
    if forward is nn.Sequential.forward:
        return _sequence(module)
    experts = experts_recipe(module)
    if experts is not None:
        return experts
    if not module._modules:
        return norm_recipe(module)
    if not any(is_linear(child) for child in module._modules.values()):
        return None
    formula = read(forward)
    expression = None if formula is None else formula.expression
    then: list[str] = []
    while formula is not None and expression is not None:
        recipe = _matched(module, expression, tuple(reversed(then)))
        if recipe is not None:
            return _completed(recipe, module, formula.relies_on)
        if not isinstance(expression, Called) or expression.child not in module._modules:
            return None
        then.append(expression.child)
        expression = expression.argument
    return None


def linear_recipe(*, is_bound: bool = False) -> LinearRecipe | None:
    """The recipe of every `nn.Linear`; None if a program has replaced functions that it calls."""
    relies_on = originals((nn.Linear, "forward"), (functional, "linear"))
    return None if relies_on is None else LinearRecipe(relies_on=relies_on, is_bound=is_bound)


def head_recipe(module: nn.Module) -> HeadRecipe | None:
    """The recipe of a head; None of other modules, and as of `linear_recipe`."""
    linear = linear_recipe() if may_be_head(module) else None
    return None if linear is None else HeadRecipe(relies_on=linear.relies_on)


def may_be_head(module: nn.Module) -> bool:
    """Whether a patch defers the outputs of the module in training."""
    is_wide = type(module) is nn.Linear and module.out_features >= losses.LEAST_VOCABULARY
    return is_wide and defers_logits()


def _sequence(module: nn.Module) -> SequenceRecipe | None:
    children = list(module._modules.items())
    pairs = tuple(
        First(layer=name, activation=activation, by=following, kind=type(applied))
        for (name, layer), (following, applied) in pairwise(children)
        if is_linear(layer) and (activation := activation_of(applied)) is not None
    )
    calls = dict.fromkeys(call for _, child in children for call in _calls(child))
    relies_on = originals((nn.Sequential, "forward"), *calls)
    if relies_on is None or not pairs:
        return None
    return SequenceRecipe(
        pairs=pairs,
        relies_on=relies_on,
        depends_on=_depends_on(children),
        is_sized=all(_is_sized(child) for _, child in children),
    )


def _is_sized(child: object) -> bool:
    return is_linear(child) or type(child) in _SIZED or activation_of(child) is not None


_SIZED = (nn.Dropout, nn.Identity, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.Sigmoid, nn.Tanh)


def _matched(
    module: nn.Module, of: Expression, then: tuple[str, ...]
) -> FeedForwardRecipe | ResidualRecipe | None:
    if isinstance(of, Combined) and not of.is_product:
        return _residual(module, of, then)
    if isinstance(of, Combined):
        return _gate(module, of, then)
    first = _first(module, of)
    if first is None:
        return None
    return FeedForwardRecipe(first=first, is_gated=False, up=None, then=then)


def _first(module: nn.Module, of: Expression) -> First | None:
    """Matches `activation(layer(x))`."""
    applied = _applied(module, of)
    if applied is None:
        return None
    activation, by, argument = applied
    layer = _layer(module, argument)
    if layer is None:
        return None
    kind = None if by is None else type(getattr(module, by))
    return First(layer=layer, activation=activation, by=by, kind=kind)


def _applied(module: nn.Module, of: Expression) -> tuple[Activation, str | None, Expression] | None:
    """Matches an activation. Returns it, the child that applies it, and its argument."""
    if isinstance(of, Activated) and of.activation is not None:
        return of.activation, None, of.argument
    if not isinstance(of, Called):
        return None
    activation = activation_of(getattr(module, of.child, None))
    return None if activation is None else (activation, of.child, of.argument)


def _layer(module: nn.Module, of: Expression) -> str | None:
    """Matches a linear layer that is called with the forward's first argument. Returns its name."""
    if not isinstance(of, Called) or not isinstance(of.argument, Given):
        return None
    known = of.argument.position == 0 and is_linear(module._modules.get(of.child))
    return of.child if known else None


def _gate(module: nn.Module, of: Combined, then: tuple[str, ...]) -> FeedForwardRecipe | None:
    for gate, other in ((of.left, of.right), (of.right, of.left)):
        first, up = _first(module, gate), _layer(module, other)
        if first is not None and up is not None:
            return FeedForwardRecipe(first=first, is_gated=True, up=up, then=then)
        applied = _applied(module, gate)
        if applied is None:
            continue
        activation, by, half = applied
        if (
            isinstance(half, Half)
            and isinstance(other, Half)
            and half.of is other.of
            and not half.second
            and other.second
            and (layer := _layer(module, half.of.argument)) is not None
        ):
            kind = None if by is None else type(getattr(module, by))
            whole = First(layer=layer, activation=activation, by=by, kind=kind)
            return FeedForwardRecipe(first=whole, is_gated=True, up=None, then=then)
    return None


def _residual(module: nn.Module, of: Combined, then: tuple[str, ...]) -> ResidualRecipe | None:
    for added, other in ((of.left, of.right), (of.right, of.left)):
        if not isinstance(other, Given) or other.position != 1:
            continue
        dropout = None
        if isinstance(added, Called) and type(module._modules.get(added.child)) is nn.Dropout:
            dropout, added = added.child, added.argument
        layer = _layer(module, added)
        if layer is not None:
            return ResidualRecipe(layer=layer, dropout=dropout, then=then)
    return None
