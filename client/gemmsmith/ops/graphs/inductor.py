"""`gemmsmith.inductor_pass`: fused products in graphs that `torch.compile` makes.

The pass works on the joint graph of both passes before torch splits it, or on that of inference. It
replaces products that an activation, a gate or a residual follows (also after LayerScale, or before
an activation), and gradients that are a product and an activation's gradient. Each becomes one
operator, if a winner computes exactly that for that size. Everything else stays as it is. The
operator looks up its kernel when it runs, and runs torch's own operators if the winner is gone.

In a graph before autograd it finds heads whose logits only a loss reads (losses.py).
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

from gemmsmith.core.epilogue import GATES, Epilogue
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.engine.functions import has_numbers, lie_alike
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.engine.plan import Plan
from gemmsmith.ops.graphs.losses import is_before_autograd, replace_losses
from gemmsmith.ops.graphs.matching import (
    Product,
    activated,
    activation_gradient,
    calls,
    depends,
    escapes,
    is_view,
    passed,
    same_value,
    scaled_columns,
    summed,
    value,
)
from gemmsmith.ops.products import backward as _backward  # noqa: F401 - registers gemmsmith::…
from gemmsmith.ops.products import fused as _fused  # noqa: F401 - this too
from gemmsmith.ops.products import gated as _gated  # noqa: F401 - this too

_aten = torch.ops.aten


def inductor_pass() -> CustomGraphPass:
    """A pass over Inductor's graphs that inserts fused products where they have winners.

        torch.compile(model, options={"joint_custom_pre_pass": gemmsmith.inductor_pass()})

    Or for every compilation of the process:

        torch._inductor.config.joint_custom_pre_pass = gemmsmith.inductor_pass()

    The same object as `pre_grad_custom_pass`, too, computes losses without the logits of a head, if
    nothing else reads them and the compiled function does not return them.

    The pass uses the winners that are in use when a graph is compiled, so call `gemmsmith.use`
    before. Sizes must be static (`dynamic=False`, or torch's default for the first compilation),
    but for the number of rows of a loss.
    Inductor's caches distinguish graphs with different winners; if they cannot, nothing is cached.
    """
    return FusingPass()


class FusingPass(CustomGraphPass):
    """See `inductor_pass`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace what one kernel computes."""
        engine = current()
        if engine is None:
            return
        if is_before_autograd(graph):
            replace_losses(engine, graph)
            return
        changed = False
        for node in calls(graph):
            if not node.users and not node.is_impure():
                graph.erase_node(node)  # a part of what was replaced
            elif isinstance(node.meta.get("val"), torch.Tensor):
                changed |= any(replace(engine, node) for replace in _RULES)
        if changed:
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
            _refresh(graph)

    def uuid(self) -> Any | None:
        """What the graphs depend on, for Inductor's caches. Returns None if that is not known."""
        engine = current()
        state = "none" if engine is None else engine.state
        return None if state is None else f"gemmsmith {_sources()} {state}"


@functools.cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _activation(engine: Engine, node: fx.Node) -> bool:
    """`activation(x · w + bias)`, and `activation(x · w + bias + residual)`."""
    match = activated(node)
    if match is None:
        return False
    for product, residual, total in summed(match.of):
        # A kernel stores what the activation is applied to, but not what the residual is added to.
        if total is not product.node and escapes({*product.passed, total}, total):
            continue
        aux = escapes({*product.passed, *passed(match.of), *match.steps}, node)
        epilogue = Epilogue.made_of(
            bias=product.bias is not None,
            activation=match.activation,
            residual=residual is not None,
            aux=aux,
        )
        if _fuse(engine, node, product, residual, epilogue, stored=total):
            return True
    return False


def _residual(engine: Engine, node: fx.Node) -> bool:
    """`x · w + bias + residual`, and `scale * (x · w + bias) + residual` (LayerScale)."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    for added, residual in (node.args, node.args[::-1]):
        product, scale = scaled_columns(added)
        if product is None or not (isinstance(added, fx.Node) and isinstance(residual, fx.Node)):
            continue
        if value(residual).shape != value(node).shape:
            continue
        aux = escapes({*product.passed, added, node}, node)
        if aux and (scale is None or escapes({added, node}, node)):
            continue
        if scale is not None and depends(residual, product.node):
            continue
        epilogue = Epilogue.made_of(
            bias=product.bias is not None, residual=True, column_scale=scale is not None, aux=aux
        )
        if _fuse(engine, node, product, residual, epilogue, scale):
            return True
    return False


def _gate(engine: Engine, node: fx.Node) -> bool:
    """`activation(x · gate) * (x · up)` of two weights."""
    if node.target is not _aten.mul.Tensor or node.kwargs:
        return False
    for first, second in (node.args, node.args[::-1]):
        match = activated(first) if isinstance(first, fx.Node) else None
        if match is None or match.activation not in GATES:
            continue
        gate, up = Product.at(match.of), Product.at(second)
        if gate is None or up is None or gate.node is up.node:
            continue
        if gate.bias is not None or up.bias is not None or not same_value(gate.x, up.x):
            continue
        aux = escapes({*gate.passed, *up.passed, *match.steps, node}, node)
        epilogue = Epilogue.made_of(activation=match.activation, gate=True, aux=aux)
        weights = _rows(gate.weight), _rows(up.weight)
        plan, graph = _plan(engine, gate.x, weights[0], epilogue), node.graph
        if plan is None or not lie_alike(*weights) or epilogue is None:
            continue
        with graph.inserting_before(node):
            operands = (_transposed(graph, gate.weight), _transposed(graph, up.weight))
            out = _call(
                graph,
                torch.ops.gemmsmith.gated_product.default,
                (gate.x, *operands, False, epilogue.value),
            )
            _put(graph, node, _item(graph, out, 0))
            if aux:
                both = _item(graph, out, 1)
                half = value(gate.node).shape[1]
                for product, start in ((gate, 0), (up, half)):
                    part = _call(graph, _aten.slice.Tensor, (both, 1, start, start + half))
                    _put(graph, product.node, part)
        return True
    return False


def _gradient(engine: Engine, node: fx.Node) -> bool:
    """`(dy · w) * activation'(aux)`, and the sum of its rows, if the graph has that too."""
    match = activation_gradient(node)
    product = None if match is None else Product.at(match.of)
    if match is None or product is None or product.bias is not None:
        return False
    if escapes({*product.passed, *match.steps}, node) or value(match.at).shape != value(node).shape:
        return False
    if not value(match.at).is_contiguous():
        return False
    sums = _sum_of_rows(node)
    for sum_of_rows in (sums, None) if sums is not None else (None,):
        epilogue = Epilogue.backward_of(match.activation, bias_gradient=sum_of_rows is not None)
        plan = _plan(engine, product.x, value(product.weight), epilogue, Form.MATMUL)
        graph = node.graph
        if plan is None or epilogue is None:
            continue
        with graph.inserting_before(node):
            size = list(value(product.node).shape)
            aux = match.at
            if value(aux).dim() != 2:
                aux = _call(graph, _aten.reshape.default, (aux, size))
            out = _call(
                graph,
                torch.ops.gemmsmith.backward_product.default,
                (product.x, product.weight, aux, epilogue.value),
            )
            _put(graph, node, _item(graph, out, 0))
            if sum_of_rows is not None:
                _put(graph, sum_of_rows, _item(graph, out, 2))
        return True
    return False


def _sum_of_rows(of: fx.Node) -> fx.Node | None:
    """The node that sums another over all but its last dimension, in its type."""
    for user in of.users:
        if is_view(user) and value(user).shape[-1] == value(of).shape[-1]:
            sum_of_view = _sum_of_rows(user)
            if sum_of_view is not None:
                return sum_of_view
        if user.target is _aten.sum.dim_IntList and not user.kwargs:
            over = [int(dim) % value(of).dim() for dim in user.args[1]]  # type: ignore[union-attr, arg-type]
            if sorted(over) == list(range(value(of).dim() - 1)):
                return user
    return None


_RULES: tuple[Callable[[Engine, fx.Node], bool], ...] = (
    _gate,
    _activation,
    _residual,
    _gradient,
)


def _fuse(
    engine: Engine,
    node: fx.Node,
    product: Product,
    residual: fx.Node | None,
    epilogue: Epilogue | None,
    scale: fx.Node | None = None,
    stored: fx.Node | None = None,
) -> bool:
    """Replace a product and what follows it by one operator, if a winner computes both.

    If the epilogue stores aux, it is the value of `stored`: by default, of the product.
    """
    plan = _plan(engine, product.x, _rows(product.weight), epilogue)
    if plan is None or epilogue is None:
        return False
    graph = node.graph
    flat = None if residual is None else value(residual).reshape(value(product.node).shape)
    bias = None if product.bias is None else value(product.bias)
    factors = None if scale is None else value(scale)
    if not plan.suits(present(bias=bias, residual=flat, column_scale=factors)):
        return False
    with graph.inserting_before(node):
        added = residual
        if residual is not None and value(residual).dim() != 2:
            size = list(value(product.node).shape)
            added = _call(graph, _aten.reshape.default, (residual, size))
        weight = _transposed(graph, product.weight)
        arguments: tuple[Any, ...] = (product.x, weight, product.bias, added, epilogue.value)
        arguments = arguments if scale is None else (*arguments, scale)
        out = _call(graph, torch.ops.gemmsmith.fused_product.default, arguments)
        _put(graph, node, _item(graph, out, 0))
        if epilogue.stores_aux:
            _put(graph, stored or product.node, _item(graph, out, 1))
    return True


def _plan(
    engine: Engine,
    x: fx.Node,
    weight: torch.Tensor,
    epilogue: Epilogue | None,
    form: Form = Form.LINEAR,
) -> Plan | None:
    a = value(x)
    if epilogue is None or not has_numbers(a, weight):
        return None
    return engine.plan(form, Spec.of(a), Spec.of(weight), epilogue=epilogue)


def _rows(weight: fx.Node) -> torch.Tensor:
    return value(weight).t()


def _transposed(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """The transposed weight in the graph; a transposed one is not transposed again."""
    if weight.target is _aten.permute.default and list(weight.args[1]) == [1, 0]:  # type: ignore[arg-type]
        inner = weight.args[0]
        assert isinstance(inner, fx.Node)  # noqa: S101 - permute's first argument is a tensor
        return inner
    return _call(graph, _aten.permute.default, (weight, [1, 0]))


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = _traced(target, args, {})
    return node


def _refresh(graph: fx.Graph) -> None:
    """Trace again the values that changed: halves of one tensor have other strides than two."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        known = node.meta.get("val")
        if node.op != "call_function" or not isinstance(known, torch.Tensor):
            continue
        if node.target is _aten.slice.Tensor or changed.intersection(node.all_input_nodes):
            before = known.stride()
            now = _traced(node.target, node.args, node.kwargs)
            if now.stride() != before or node.target is _aten.slice.Tensor:
                node.meta["val"] = now
                changed.add(node)


def _traced(target: Any, args: Any, kwargs: Any) -> Any:
    """A step's value, traced without data."""
    args, kwargs = fx.node.map_arg((args, kwargs), value)
    mode = detect_fake_mode(args)
    assert mode is not None  # noqa: S101 - Inductor traces with fake tensors
    with mode:
        return target(*args, **kwargs)


def _item(graph: fx.Graph, of: fx.Node, at: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (of, at))
    node.meta["val"] = of.meta["val"][at]
    return node


def _put(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Replace a node everywhere by another with as many elements."""
    shape = value(old).shape
    if value(new).shape != shape:
        new = _call(graph, _aten.reshape.default, (new, list(shape)))
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
