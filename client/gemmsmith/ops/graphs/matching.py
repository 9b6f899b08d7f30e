"""Products and what follows them in Inductor's graphs.

A graph holds an activation as pointwise steps. So our activations are decomposed by the same rules
of the installed torch, and compared with the graph step by step, the last step first. An activation
with other steps is not recognized, and stays as it is.
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
    """Whether a node has its argument's elements. Dropout that is off leaves a copy of them."""
    return node.target in VIEWS or (node.target is _aten.clone.default and not node.kwargs)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product in a graph.

    Attributes:
        node: `mm` or `addmm`.
        x: [M, K].
        weight: [K, N].
        bias: [N], or None.
        view: a node with the product's value, perhaps with other leading dimensions.
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
        """The product whose value a node has. Returns None for other nodes."""
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
    """A node's traced tensor, without data."""
    traced: torch.Tensor = node.meta["val"]
    return traced


@dataclass(frozen=True, kw_only=True)
class ActivationMatch:
    """An activation in a graph.

    Attributes:
        activation: which activation.
        of: its argument.
        steps: the nodes that it consists of, without `of`.
    """

    activation: Activation
    of: fx.Node
    steps: frozenset[fx.Node]


def activated(node: fx.Node) -> ActivationMatch | None:
    """The activation that ends in this node."""
    dtype = value(node).dtype
    for activation, pattern in _activations(dtype):
        pairs = _matched(pattern, node)
        if pairs is not None:
            (argument,) = _placeholders(pattern)
            steps = (real for step, real in pairs.items() if step is not argument)
            return ActivationMatch(
                activation=activation, of=pairs[argument], steps=frozenset(steps)
            )
    return None


@dataclass(frozen=True, kw_only=True)
class GradientMatch:
    """The gradient of an activation's argument, in a graph.

    Attributes:
        activation: which activation.
        of: the gradient of its result.
        at: its argument.
        steps: the nodes that it consists of, without these two and without those that depend on
            `at` alone: the activation itself may share them.
    """

    activation: Activation
    of: fx.Node
    at: fx.Node
    steps: frozenset[fx.Node]


def activation_gradient(node: fx.Node) -> GradientMatch | None:
    """The gradient of an activation that ends in this node."""
    for activation, pattern in _gradients(value(node).dtype):
        pairs = _matched(pattern, node)
        if pairs is not None:
            gradient, at = _placeholders(pattern)
            later = {gradient}
            for step in pattern.nodes:
                if not later.isdisjoint(step.all_input_nodes):
                    later.add(step)
            return GradientMatch(
                activation=activation,
                of=pairs[gradient],
                at=pairs[at],
                steps=frozenset(pairs[step] for step in later - {gradient} if step in pairs),
            )
    return None


def _placeholders(pattern: fx.Graph) -> list[fx.Node]:
    return [node for node in pattern.nodes if node.op == "placeholder"]


def _matched(pattern: fx.Graph, last: fx.Node) -> dict[fx.Node, Any] | None:
    """The graph's nodes by the pattern's steps. Returns None if it does not match."""
    (output,) = (node for node in pattern.nodes if node.op == "output")
    pairs: dict[fx.Node, Any] = {}
    return pairs if _agree(output.args[0], last, pairs) else None


def _agree(step: Any, real: Any, pairs: dict[fx.Node, Any]) -> bool:
    """Whether a step of a pattern and an argument in a graph are the same computation."""
    step, real = _without_aliases(step), _without_aliases(real)
    if isinstance(step, fx.Node):
        if not isinstance(real, fx.Node):
            return False
        if step in pairs:
            return pairs[step] is real
        if step.op != "placeholder":
            if step.target is not real.target or step.kwargs.keys() != real.kwargs.keys():
                return False
            if len(step.args) != len(real.args):
                return False
            arguments = [
                *zip(step.args, real.args, strict=True),
                *((step.kwargs[name], real.kwargs[name]) for name in step.kwargs),
            ]
            if not all(_agree(ours, theirs, pairs) for ours, theirs in arguments):
                return False
        pairs[step] = real
        return True
    return type(step) is type(real) and bool(step == real)


def _without_aliases(argument: Any) -> Any:
    """In some graphs, what autograd saved for a gradient is an alias."""
    while isinstance(argument, fx.Node) and argument.target is _aten.alias.default:
        argument = argument.args[0]
    return argument


Patterns = tuple[tuple[Activation, fx.Graph], ...]


@functools.cache
def _activations(dtype: torch.dtype) -> Patterns:
    """Our activations, decomposed."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    sample = torch.ones(2, 2, dtype=dtype)
    ours = [(activation, ACTIVATIONS[activation]) for activation in Activation]
    return tuple(
        (activation, _decomposed(function, sample))
        for activation, function in (*ours, (Activation.GELU_TANH, _gelu_in_steps))
    )


def _gelu_in_steps(x: torch.Tensor) -> torch.Tensor:
    """As GPT-2 and later models write it: `gelu_new` in transformers."""
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


@functools.cache
def _gradients(dtype: torch.dtype) -> Patterns:
    """The gradients of activations, decomposed."""
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    # A tracer takes one tensor that is passed twice for one operand.
    samples = (torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))
    gelu = _aten.gelu_backward
    steps = (
        (Activation.GELU_TANH, functools.partial(gelu, approximate="tanh")),
        (Activation.GELU, gelu),
        (Activation.SILU, _aten.silu_backward),
        (Activation.GELU_TANH, _gradient_of_gelu_in_steps),
    )
    return tuple((activation, _decomposed(step, *samples)) for activation, step in steps)


def _gradient_of_gelu_in_steps(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        at = x.requires_grad_()
        (of_argument,) = torch.autograd.grad(_gelu_in_steps(at), at, gradient)
    return of_argument


def _decomposed(function: Any, *samples: torch.Tensor) -> fx.Graph:
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        traced = make_fx(lambda *operands: function(*operands), select_decomp_table())(*samples)
    return traced.graph


def same_value(first: Any, second: Any) -> bool:
    """Whether two nodes are the same, or equal views of one node."""
    if first is second:
        return True
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return False
    return (
        is_view(first)
        and is_view(second)
        and first.args[0] is second.args[0]
        and value(first).shape == value(second).shape
    )


def scaled_columns(node: Any) -> tuple[Product | None, fx.Node | None]:
    """The product whose value a node has, and the factors of its columns, if there are any."""
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


def passed(node: fx.Node) -> Iterator[fx.Node]:
    """A node, and, if it is a view, what it is a view of."""
    yield node
    if is_view(node):
        viewed = node.args[0]
        assert isinstance(viewed, fx.Node)  # noqa: S101 - a view's first argument is a tensor
        yield from passed(viewed)


def summed(node: fx.Node) -> Iterator[tuple[Product, fx.Node | None, fx.Node]]:
    """The product whose value a node has, or the products that the node adds a matrix to.

    Yields the product, the matrix if there is one, and the node that has the value: the product's
    own, or that of the sum.
    """
    product = Product.at(node)
    if product is not None:
        yield product, None, product.node
        return
    *_, total = passed(node)
    if total.target is not _aten.add.Tensor or total.kwargs or len(total.args) != 2:
        return
    for added, other in (total.args, total.args[::-1]):
        product = Product.at(added)
        if product is None or not isinstance(other, fx.Node):
            continue
        if value(other).shape == value(total).shape:
            yield product, other, total


def depends(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node is computed from another, or is it."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        last = left.pop()
        if last is other:
            return True
        if last not in seen:
            seen.add(last)
            left.extend(last.all_input_nodes)
    return False


def escapes(inside: set[fx.Node], last: fx.Node) -> bool:
    """Whether a node outside uses the value of one of these nodes other than the last."""
    return any(user not in inside for node in inside - {last} for user in node.users)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The graph's steps, last first."""
    yield from (node for node in reversed(list(graph.nodes)) if node.op == "call_function")
