"""The forwards of a patched model's layers: a product and what follows it in a single kernel.

At every call, a layer looks for a winner that computes this product with everything that follows.
The module's own forward runs if there is no such winner, if a child that would be skipped has hooks
or is not a plain layer any more, if a dropout between them is active, and if the operands are not
plain torch tensors. In a traced graph, an operator of ours is used in any case; it runs torch's own
operators if no kernel won.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from gemmsmith.core.epilogue import GATES
from gemmsmith.ops.below.blocks import Weights
from gemmsmith.ops.below.experts import weights_of
from gemmsmith.ops.below.prospects import fewest_fused, fewest_of_experts, fewest_rows
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.models import heads
from gemmsmith.ops.models.expert_layers import ExpertsRecipe, run_experts
from gemmsmith.ops.models.forwards import (
    LEFT,
    Forwards,
    Least,
    Left,
    Run,
    has_no_global_hooks,
    is_plain,
)
from gemmsmith.ops.models.norms import NormRecipe, has_winners, run_norm
from gemmsmith.ops.models.recipes import (
    FeedForwardRecipe,
    First,
    HeadRecipe,
    LinearRecipe,
    Recipe,
    ResidualRecipe,
    SequenceRecipe,
    activation_of,
    head_recipe,
    is_transposed,
    linear_recipe,
    recipe_of,
    sizes_of,
)
from gemmsmith.ops.products import norms, operators, recording
from gemmsmith.ops.products.feedforward import MlpCall
from gemmsmith.ops.products.fused import LinearCall
from gemmsmith.ops.products.gated import GatedCall
from gemmsmith.ops.products.registry import CallWay, are_torchs, wants_gradient, way_of

Result = torch.Tensor | Left | None


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
    for name, module in model.named_modules():
        recipe = recipe_of(module) or head_recipe(module)
        if recipe is not None:
            yield Recognized(name=name, module=module, recipe=recipe)


def saves_passes(recipe: Recipe) -> bool:
    """Whether a layer runs while any winners are in use, because it saves passes by itself."""
    if isinstance(recipe, ExpertsRecipe):
        return not recipe.is_swiglu
    return isinstance(recipe, NormRecipe)


def take_over(forwards: Forwards, layers: Iterable[Recognized]) -> None:
    for layer in layers:
        run, least = _RUNS[type(layer.recipe)], _least_of(layer.module, layer.recipe)
        forwards.put(layer.module, run, layer.recipe, least)


def take_over_linear(
    forwards: Forwards, layers: Iterable[nn.Linear], *, is_bound: bool = False
) -> None:
    """Patch linear layers. Their products run alone, without what follows them.

    `is_bound`: as of `LinearRecipe`.
    """
    recipe = linear_recipe(is_bound=is_bound)
    if recipe is not None:
        for layer in layers:
            least = partial(_least_of_linear, frozenset(sizes_of(layer))) if is_bound else _unknown
            forwards.put(layer, _linear, recipe, least)


def _least_of(module: nn.Module, recipe: Recipe) -> Least:
    if saves_passes(recipe):
        fewest = norms.LEAST if isinstance(recipe, NormRecipe) and recipe.is_fused else 0
        return lambda engine: fewest if has_winners(engine) else inf
    if isinstance(recipe, ExpertsRecipe):
        opens: Any = module.gate_up_proj
        number, _, width = opens.shape
        return partial(_least_of_experts, weights_of(module), width / number)
    if isinstance(recipe, HeadRecipe):
        return _unknown
    names = [name for name, _ in recipe.depends_on.weights if name is not None]
    sizes = frozenset(pair for name in names for pair in sizes_of(module._modules[name]))
    keeps_rows = not isinstance(recipe, SequenceRecipe) or recipe.is_sized
    return partial(_least_of_fused, sizes, keeps_rows)


def _least_of_fused(weights: frozenset[tuple[int, int]], keeps_rows: bool, engine: Engine) -> float:
    rows = fewest_fused(engine, weights)
    return rows * min(map(min, weights)) if keeps_rows or rows == inf else 0


def _least_of_linear(weights: frozenset[tuple[int, int]], engine: Engine) -> float:
    return fewest_rows(engine, weights) * min(k for _, k in weights)


def _least_of_experts(weights: Weights, of_row: float, engine: Engine) -> float:
    """`of_row`: how much of a token's elements stand for a row: it may choose all experts."""
    return fewest_of_experts(engine, weights) * of_row


def _unknown(_: Engine) -> float:
    return 0


def _weight_of(layer: Any) -> torch.Tensor | None:
    """The weight, [N, K], of a linear layer whose product may be computed without calling it.

    Returns None if the layer must be called: it is of another kind now, or has hooks.
    """
    if type(layer) is nn.Linear:
        return layer.weight if is_plain(layer) else None
    return layer.weight.t() if is_transposed(layer) and is_plain(layer) else None


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


def second(module: nn.Module, following: Iterable[str]) -> tuple[Any, torch.Tensor | None, int]:
    """The next linear layer after inactive dropouts, its weight and position, counted from 1.

    Returns (None, None, 0) if another of the children `following` comes first.
    """
    for count, name in enumerate(following, 1):
        child = getattr(module, name)
        weight = _weight_of(child)
        if weight is not None:
            return child, weight, count
        if _drops(child):
            break
    return None, None, 0


def _fused(call: LinearCall | GatedCall | MlpCall, way: CallWay) -> torch.Tensor | None:
    """The call by a single kernel. Returns None if no winner computes all of it, or saves enough.

    A recorder notes what could be fused, and torch runs the products, which are noted too. A
    compiler gets an operator, which becomes torch's own where no kernel wins.
    """
    engine = current()
    if way is CallWay.EAGER and not torch.is_autocast_enabled(call.x.device.type):
        return call.run_if_fused(way, engine, patched=True)
    if recording.is_recording():
        if are_torchs(*call):
            call.record()
        return None
    if engine is None or way is CallWay.TORCH:
        return None
    if torch.compiler.is_compiling():
        return call.run()
    return call.run() if call.wins(engine) and not call.saves_little(engine) else None


def _left(way: CallWay, *calls: LinearCall | GatedCall | MlpCall) -> Left | None:
    """`LEFT` if it is decided that no winner computes any of these, or saves enough. Else None."""
    engine = current() if way is CallWay.EAGER and not torch.compiler.is_compiling() else None
    if engine is None:
        return None
    for call in calls:
        if not call.lacks(engine) and not call.saves_little(engine):
            return None
    return LEFT


def _fused_with(
    call: LinearCall | GatedCall, module: nn.Module, following: Sequence[str]
) -> tuple[Result, int]:
    """A layer, its activation and possibly the layer after it, computed by kernels.

    Both layers run as one function where their backward product has a fused kernel. Where no
    gradient is needed, nothing is gained beyond the kernel of `call`.

    Returns the value, or as `Part` if no kernel won, and the number of following children that it
    includes.
    """
    x, weight, bias, activation = call.x, call.weight, call.bias, call.activation
    up = call.up if isinstance(call, GatedCall) else None
    is_gated, way = isinstance(call, GatedCall), None
    others: list[MlpCall] = []
    if wants_gradient(x, weight, up, bias) and (not is_gated or activation in GATES):
        layer, down, count = second(module, following)
        if down is not None and activation is not None:
            both = MlpCall(x, weight, down, up, bias, layer.bias, None, activation)
            if both.is_gated is is_gated:
                others.append(both)
                way = way_of(*both)
                value = _fused(both, way)
                if value is not None:
                    return value, count
                if way is CallWay.TORCH:  # a tensor of the second layer may be the reason
                    way = None
        elif not all(is_plain(getattr(module, name)) for name in following):
            return _fused(call, way_of(*call)), 0  # its hooks may be removed
    if is_gated and (bias is not None or activation not in GATES):  # no kernel has these
        return LEFT, 0
    way = way or way_of(*call)
    value = _fused(call, way)
    return (_left(way, call, *others) if value is None else value), 0


def _may_fuse(arguments: tuple[Any, ...]) -> bool:
    """Whether kernels may have these operands, and something has kernels or records."""
    if current() is None and not recording.is_recording():
        return False
    for argument in arguments:  # no `all`: this runs at every call of a layer
        if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
            return False
    return has_no_global_hooks()


def _by_part(part: Part) -> Run:
    """Computes a part with kernels, then calls the remaining children."""

    def run(recipe: Any, module: Any, arguments: tuple[Any, ...]) -> Any:
        if not _may_fuse(arguments):
            return NotImplemented
        hidden, count = part(recipe, module, *arguments)
        if hidden is None or hidden is LEFT:
            return hidden or NotImplemented
        for name in recipe.then[count:]:
            hidden = getattr(module, name)(hidden)
        return hidden

    return run


Part = Callable[..., tuple[Result, int]]
"""Computes a part of a module. Returns the value, and the number of children in `then` that it
includes. Without a kernel the value is None, or `LEFT` if that is decided for such operands."""


def _feed_forward(
    recipe: FeedForwardRecipe, module: Any, *operands: torch.Tensor
) -> tuple[Result, int]:
    first, up = recipe.first, None
    layer = getattr(module, first.layer)
    weight = _weight_of(layer)
    if len(operands) != 1 or weight is None or not _applies(module, first):
        return None, 0
    if recipe.up is not None:
        other = getattr(module, recipe.up)
        up = _weight_of(other)
        if up is None:
            return None, 0
        # Kernels with a gate do not add a bias.
        if layer.bias is not None or other.bias is not None or up.shape != weight.shape:
            return LEFT, 0
    elif recipe.is_gated and weight.shape[0] % 2:
        return LEFT, 0
    call: LinearCall | GatedCall
    if recipe.is_gated:
        call = GatedCall(operands[0], weight, up, layer.bias, first.activation)
    else:
        call = LinearCall(operands[0], weight, layer.bias, activation=first.activation)
    return _fused_with(call, module, recipe.then)


def _residual(recipe: ResidualRecipe, module: Any, *operands: torch.Tensor) -> tuple[Result, int]:
    layer = getattr(module, recipe.layer)
    weight = _weight_of(layer)
    if len(operands) != 2 or weight is None:
        return None, 0
    if recipe.dropout is not None:
        dropout = getattr(module, recipe.dropout)
        if _drops(dropout):
            return (LEFT if type(dropout) is nn.Dropout and is_plain(dropout) else None), 0
    call = LinearCall(operands[0], weight, layer.bias, operands[1])
    way = way_of(*call)
    value = _fused(call, way)
    return (_left(way, call) if value is None else value), 0


def _sequence(recipe: SequenceRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    """The forward of a `Sequential`: runs its pairs with kernels, and calls all other children."""
    if len(arguments) != 1:
        return NotImplemented
    (value,) = arguments
    pairs = {pair.layer: pair for pair in recipe.pairs}
    children: dict[str, Any] = module._modules
    names, at, is_left = list(children), 0, recipe.is_sized
    while at < len(names):
        hidden, count, name = None, 0, names[at]
        if name in pairs:
            # The next layer with an activation runs its own kernel. This is a loop because torch
            # 2.11 does not compile `takewhile`.
            rest = []
            for following in names[at + 2 :]:
                if following in pairs:
                    break
                rest.append(following)
            hidden, count = _pair(module, pairs[name], children[name], value, rest)
            is_left = is_left and hidden is LEFT
        if hidden is None or hidden is LEFT:
            value, at = children[name](value), at + 1
        else:
            value, at = hidden, at + 2 + count
    return Left(value) if is_left else value


def _pair(module: Any, pair: First, layer: Any, x: Any, following: list[str]) -> tuple[Result, int]:
    weight = _weight_of(layer) if _may_fuse((x,)) else None
    if weight is None or not _applies(module, pair):
        return None, 0
    call = LinearCall(x, weight, layer.bias, activation=pair.activation)
    return _fused_with(call, module, following)


def _linear(recipe: LinearRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 1 or not isinstance(arguments[0], torch.Tensor):
        return NotImplemented
    operands = arguments[0], module.weight, module.bias
    engine = None if torch.compiler.is_compiling() else current()
    if engine is None or engine.watcher is not None or way_of(*operands) is not CallWay.EAGER:
        return operators.linear(*operands)
    products = operators.products_of_linear(*operands, forward_only=recipe.is_bound)
    if any(engine.plan(*product) is not None for product in products):
        return operators.linear(*operands)
    return LEFT if all(engine.lacks(*product) for product in products) else NotImplemented


def _head(recipe: HeadRecipe, module: Any, arguments: tuple[Any, ...]) -> Any:
    if module.training and len(arguments) == 1 and is_plain(module) and has_no_global_hooks():
        logits = heads.logits(*arguments, module.weight, module.bias)
        if logits is not None:
            return logits
    value = _linear(recipe, module, arguments)
    return NotImplemented if value is LEFT else value  # it depends on more than the operands


_RUNS: dict[type, Run] = {
    FeedForwardRecipe: _by_part(_feed_forward),
    ResidualRecipe: _by_part(_residual),
    SequenceRecipe: _sequence,
    ExpertsRecipe: run_experts,
    NormRecipe: run_norm,
    HeadRecipe: _head,
}
