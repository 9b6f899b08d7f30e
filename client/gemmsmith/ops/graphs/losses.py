"""A head and its loss in a graph as a program writes it, before autograd.

Logits that only a loss reads become `linear_cross_entropy` of the head's operands, as in eager
programs. Logits that a graph returns, as the compiled forward of a model of transformers does,
stay: their gradient comes from outside.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.functions import has_numbers
from gemmsmith.ops.products import losses
from gemmsmith.ops.products.logit_scaling import LogitScaling
from gemmsmith.ops.products.loss_passes import LossOptions

_SIGNATURE = inspect.signature(functional.cross_entropy)
_OPTIONS = {"ignore_index": int, "label_smoothing": float, "reduction": str}

# Functions and names of methods.
_VIEWS = {"view", "reshape", "flatten", torch.flatten, torch.reshape}
_CASTS = {"float", "to", "contiguous"}
_CAPS = {"tanh", torch.tanh}
_PRODUCTS = ("mul", operator.mul, torch.mul)
_SCALES: dict[Any, Callable[[LogitScaling, float], bool]] = {
    **dict.fromkeys(_PRODUCTS, LogitScaling.multiply),
    **dict.fromkeys(("div", operator.truediv, torch.div), LogitScaling.divide),
}
_IN_PLACE = {
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"),
        *("irshift", "isub", "itruediv", "ixor", "setitem"),
    )
}
_STEPS = {*_VIEWS, *_CASTS, *_CAPS, *_SCALES, operator.getitem}


def is_before_autograd(graph: fx.Graph) -> bool:
    """Whether a graph holds the program's own calls, as Dynamo has written them."""
    return any("example_value" in node.meta for node in graph.nodes)


def replace_losses(engine: Engine, graph: fx.Graph) -> None:
    """Compute losses from the operands of heads, where nothing else reads the logits."""
    if engine.is_invariant:
        return
    autocasts = 0
    for node in list(graph.nodes):
        autocasts += "enter_autocast" in str(node.target)
        autocasts -= "exit_autocast" in str(node.target)
        if node.target is functional.cross_entropy and not autocasts:
            _replace(engine, node)


def _replace(engine: Engine, loss: fx.Node) -> None:
    named = _SIGNATURE.bind(*loss.args, **loss.kwargs).arguments
    logits, labels = named.pop("input"), named.pop("target")
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    if any(value is not None for value in named.values()):
        return
    if any(type(value) is not _OPTIONS[name] for name, value in options.items()):
        return
    if options.get("reduction") == "none":  # takes a fourth product, which compiled code does not
        return
    chain = list(_chain(logits))
    if not chain or not _is_head(engine, chain[-1]) or not _are_labels(labels, logits):
        return
    *steps, head = chain
    x, weight, bias = _operands(head)
    left = _left(steps[::-1], _value(x), _value(weight).shape[1])
    if left is None or any(map(_changes, _between(head, loss))):
        return
    rows, scale, softcap = left
    graph, dtype = loss.graph, _value(loss).dtype
    with graph.inserting_before(loss):
        for function, argument in rows:
            x = graph.call_function(function, (x, argument))
        if scale != 1:
            x = graph.call_function(operator.mul, (x, scale))
            bias = None if bias is None else graph.call_function(operator.mul, (bias, scale))
        out = graph.call_function(
            torch.ops.gemmsmith.linear_cross_entropy.default,
            (x, weight, bias, labels, None, None, *LossOptions(softcap=softcap, **options)),
        )
        if dtype is not torch.float32:
            out = graph.call_method("to", (out, dtype))
    out.meta["example_value"] = _value(loss)
    loss.replace_all_uses_with(out)
    for node in (loss, *chain):  # only the one before reads each
        graph.erase_node(node)


def _chain(logits: object) -> Iterator[fx.Node]:
    """The steps from what a loss reads back to the head, if only the next step reads each."""
    node = logits
    while isinstance(node, fx.Node) and len(node.users) == 1:
        yield node
        if node.target not in _STEPS or len(node.all_input_nodes) != 1:
            return
        (node,) = node.all_input_nodes


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _changes(node: fx.Node) -> bool:
    """Whether a step may write to what another node reads, or switch gradients or autocast.

    The head is computed where its loss was, so nothing between them may do that.
    """
    name = str(getattr(node.target, "__name__", node.target))
    schema = getattr(node.target, "_schema", None)
    return (
        name.endswith("_")
        or node.target in _IN_PLACE
        or bool(node.kwargs.get("inplace") or node.kwargs.get("out") is not None)
        or bool(schema is not None and schema.is_mutable)
        or any(word in name for word in ("autocast", "grad_enabled", "inference_mode"))
    )


_Row = tuple[Callable[[Any, Any], Any], Any]
_Rows = list[_Row]


def _left(
    steps: Sequence[fx.Node], x: torch.Tensor, depth: int
) -> tuple[_Rows, float, float | None] | None:
    """What steps between a head and its loss leave of the operands.

    The depth is that of the weight: the last size of x may be a symbol that has one value.

    Returns functions of x with their second argument, what x and the bias are multiplied by, and
    the softcap; or None if a loss cannot follow these steps.
    """
    rows: _Rows = []
    scaling, dtype = LogitScaling(), x.dtype
    for step in steps:
        (read,) = step.all_input_nodes
        before, after = _value(read), _value(step)
        others = [other for other in (*step.args, *step.kwargs.values()) if other is not read]
        size = (*after.shape[:-1], depth)
        if after.device != before.device or not _same(after.shape[-1:], before.shape[-1:]):
            return None
        if step.target in _SCALES:
            number = others[0] if len(others) == 1 else None  # else logits times themselves
            is_first = step.args[:1] == (read,) or step.target in _PRODUCTS
            follows = (
                isinstance(number, int | float)
                and is_first
                and _SCALES[step.target](scaling, number)
            )
        elif step.target in _CAPS:
            follows = scaling.tanh()
        elif step.target in _CASTS:
            follows = after.dtype in (torch.float32, dtype)
        else:
            row = _of_rows(step, others, (-1, depth) if after.dim() == 2 else size)
            if row is None:
                return None
            rows.append(row)
            function, argument = row
            x = function(x, argument)
            follows = _same(x.shape, size)
        if not follows:
            return None
    of_operands = scaling.of_operands(dtype)
    return None if of_operands is None else (rows, *of_operands)


def _of_rows(step: fx.Node, others: Sequence[Any], size: Sequence[Any]) -> _Row | None:
    """The function of x, with its argument, in place of a view or a slice of logits.

    Returns None if a size of the result is a symbol.
    """
    if step.target not in _VIEWS:
        return operator.getitem, others[0]
    return (torch.reshape, size) if all(type(extent) is int for extent in size) else None


def _same(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes, of which some may be symbols, are the same for all values."""
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


def _is_head(engine: Engine, node: fx.Node) -> bool:
    values = [_value(operand) for operand in _operands(node) if operand is not None]
    if node.target is not functional.linear or len(values) < 2:
        return False
    if not all(isinstance(value, FakeTensor) for value in values):
        return False
    x, weight, *_ = values
    return (
        x.dtype is torch.bfloat16  # FP16 takes a fourth product, too
        and x.device.type == engine.platform.kind
        and all(value.dtype is x.dtype and value.device == x.device for value in values)
        and has_numbers(weight)
        and weight.shape[0] >= losses.LEAST_VOCABULARY
    )


def _are_labels(labels: object, logits: object) -> bool:
    value, read = _value(labels), _value(logits)
    return (
        isinstance(value, FakeTensor)
        and value.dtype is torch.int64
        and value.device == read.device
        and read.dim() == 2
        and _same(value.shape, read.shape[:1])
    )


def _operands(linear: fx.Node) -> tuple[Any, Any, Any]:
    """x, weight and bias, or None."""
    named = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs
    return named.get("input"), named.get("weight"), named.get("bias")


def _value(node: object) -> Any:
    """The tensor without data that Dynamo has computed for a node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None
