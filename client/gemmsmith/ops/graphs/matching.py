"""Products and what follows them in Inductor's graphs.

A graph holds an activation as the pointwise steps that it was taken apart into. So each of ours is
taken apart by the same rules, and compared step by step from its last one, whatever torch's version
makes of it. What comes out differently there, is not found, and stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation

_aten = torch.ops.aten
VIEWS = (
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
)


def is_view(node: fx.Node) -> bool:
    """Whether a node holds its argument's elements; dropout that is off leaves a copy of them."""
    return node.target in VIEWS or (node.target is _aten.clone.default and not node.kwargs)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product in a graph.

    Attributes:
        node: `mm` or `addmm`.
        x: [M, K].
        weight: [K, N].
        bias: [N]; None: none.
        view: the node that has the product's value, perhaps with other leading dimensions.
        passed: the nodes from `node` to `view`.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    view: fx.Node
    passed: tuple[fx.Node, ...]

    @classmethod
    def at(cls, view: object) -> Product | None:
        """The one whose value a node is; None: it is another's."""
        passed: list[fx.Node] = []
        node = view
        while isinstance(node, fx.Node) and is_view(node):
            if value(node).shape[-1] != value(node.args[0]).shape[-1]:
                return None
            passed.append(node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or not isinstance(view, fx.Node) or node.kwargs:
            return None
        operands: tuple[Any, ...] = node.args
        bias = None
        if node.target is _aten.addmm.default:
            bias, *operands = operands  # type: ignore[assignment]
            if value(bias).dim() != 1 or value(bias).shape != value(node).shape[1:]:
                return None
        elif node.target is not _aten.mm.default:
            return None
        x, weight = operands
        return cls(node=node, x=x, weight=weight, bias=bias, view=view, passed=(node, *passed))


def value(node: Any) -> torch.Tensor:
    """What a tracer knows of a node's tensor."""
    found: torch.Tensor = node.meta["val"]
    return found


@dataclass(frozen=True, kw_only=True)
class FoundActivation:
    """An activation in a graph.

    Attributes:
        activation: which.
        of: what it is applied to.
        steps: the nodes that it consists of, without `of`.
    """

    activation: Activation
    of: fx.Node
    steps: frozenset[fx.Node]


def activated(node: fx.Node) -> FoundActivation | None:
    """The activation that ends in this node."""
    dtype = value(node).dtype
    for activation, pattern in _activations(dtype):
        (output,) = (one for one in pattern.nodes if one.op == "output")
        found: dict[fx.Node, Any] = {}
        if _agree(output.args[0], node, found):
            (given,) = (one for one in pattern.nodes if one.op == "placeholder")
            steps = (real for step, real in found.items() if step is not given)
            return FoundActivation(activation=activation, of=found[given], steps=frozenset(steps))
    return None


@dataclass(frozen=True, kw_only=True)
class FoundGradient:
    """The gradient of an activation's argument, in a graph.

    Attributes:
        activation: which.
        of: the gradient of its result.
        at: what it was applied to.
        steps: the nodes that it consists of, without these two and without those that are of `at`
            alone: the activation itself may share them.
    """

    activation: Activation
    of: fx.Node
    at: fx.Node
    steps: frozenset[fx.Node]


def activation_gradient(node: fx.Node) -> FoundGradient | None:
    """The gradient of an activation that ends in this node."""
    for activation, pattern in _gradients(value(node).dtype):
        (output,) = (one for one in pattern.nodes if one.op == "output")
        found: dict[fx.Node, Any] = {}
        if _agree(output.args[0], node, found):
            gradient, at = (one for one in pattern.nodes if one.op == "placeholder")
            later = {gradient}
            for step in pattern.nodes:
                if not later.isdisjoint(step.all_input_nodes):
                    later.add(step)
            return FoundGradient(
                activation=activation,
                of=found[gradient],
                at=found[at],
                steps=frozenset(found[step] for step in later - {gradient} if step in found),
            )
    return None


def _agree(step: Any, real: Any, found: dict[fx.Node, Any]) -> bool:
    """Whether a step of a pattern and an argument in a graph are the same computation."""
    step, real = _without_aliases(step), _without_aliases(real)
    if isinstance(step, fx.Node):
        if not isinstance(real, fx.Node):
            return False
        if step in found:
            return found[step] is real
        if step.op != "placeholder":
            if step.target is not real.target or step.kwargs.keys() != real.kwargs.keys():
                return False
            if len(step.args) != len(real.args):
                return False
            pairs = [
                *zip(step.args, real.args, strict=True),
                *((step.kwargs[name], real.kwargs[name]) for name in step.kwargs),
            ]
            if not all(_agree(one, other, found) for one, other in pairs):
                return False
        found[step] = real
        return True
    return type(step) is type(real) and bool(step == real)


def _without_aliases(argument: Any) -> Any:
    """What autograd has stored for a gradient is an alias of it in some graphs."""
    while isinstance(argument, fx.Node) and argument.target is _aten.alias.default:
        argument = argument.args[0]
    return argument


Patterns = tuple[tuple[Activation, fx.Graph], ...]


@functools.cache
def _activations(dtype: torch.dtype) -> Patterns:
    """Ours, taken apart."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    sample = torch.ones(2, 2, dtype=dtype)
    ours = [(one, ACTIVATIONS[one]) for one in Activation]
    return tuple(
        (one, _taken_apart(function, sample))
        for one, function in (*ours, (Activation.GELU_TANH, _gelu_in_steps))
    )


def _gelu_in_steps(x: torch.Tensor) -> torch.Tensor:
    """As GPT-2 and models after it write it down: `gelu_new` in transformers."""
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


@functools.cache
def _gradients(dtype: torch.dtype) -> Patterns:
    """Their gradients' steps."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    # A tracer takes one tensor given twice for one operand.
    samples = (torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))
    gelu = _aten.gelu_backward
    steps = (
        (Activation.GELU_TANH, functools.partial(gelu, approximate="tanh")),
        (Activation.GELU, gelu),
        (Activation.SILU, _aten.silu_backward),
        (Activation.GELU_TANH, _gradient_of_gelu_in_steps),
    )
    return tuple((one, _taken_apart(step, *samples)) for one, step in steps)


def _gradient_of_gelu_in_steps(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As autograd makes it."""
    with torch.enable_grad():
        at = x.requires_grad_()
        (found,) = torch.autograd.grad(_gelu_in_steps(at), at, gradient)
    return found


def _taken_apart(function: Any, *samples: torch.Tensor) -> fx.Graph:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        traced = make_fx(lambda *given: function(*given), select_decomp_table())(*samples)
    return traced.graph


def same_value(one: Any, other: Any) -> bool:
    """Whether two nodes hold the same: views of one node, written down twice."""
    if one is other:
        return True
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return False
    return (
        is_view(one)
        and is_view(other)
        and one.args[0] is other.args[0]
        and value(one).shape == value(other).shape
    )


def scaled_columns(node: Any) -> tuple[Product | None, fx.Node | None]:
    """A product, and a factor for each of its columns if it is multiplied by such; or neither."""
    product = Product.at(node)
    multiplied = isinstance(node, fx.Node) and node.target is _aten.mul.Tensor and not node.kwargs
    if product is not None or not multiplied:
        return product, None
    for scaled, factors in (node.args, node.args[::-1]):
        product = Product.at(scaled)
        if product is None or not isinstance(factors, fx.Node):
            continue
        if value(factors).shape == value(product.node).shape[1:]:
            return product, factors
    return None, None


def depends(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node is computed from another, or is it."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        one = left.pop()
        if one is other:
            return True
        if one not in seen:
            seen.add(one)
            left.extend(one.all_input_nodes)
    return False


def escapes(inside: set[fx.Node], last: fx.Node) -> bool:
    """Whether somebody else uses what these nodes compute on the way to the last of them."""
    return any(user not in inside for node in inside - {last} for user in node.users)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The graph's steps, last first."""
    yield from (node for node in reversed(list(graph.nodes)) if node.op == "call_function")
