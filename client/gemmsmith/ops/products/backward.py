"""The product of a backward pass that takes an activation's gradient with it.

P = dY·W of the layer after an activation, and what that activation was applied to, give the
gradient of the latter: by one kernel where a winner says so (`gemmsmith.core.epilogue`), by torch's
steps otherwise.
"""

from __future__ import annotations

import torch

from gemmsmith.core import activations
from gemmsmith.core.epilogue import Backward, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.products import telling
from gemmsmith.ops.products.gated import gate_gradients
from gemmsmith.ops.products.registry import register

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""D, the activation's value, the bias gradient; empty where the epilogue gives none."""


def product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: Epilogue
) -> Tensors:
    """`dy · weight` and what follows it, by a kernel or by torch. Below autograd."""
    if observers.unobserved() or observers.is_watched():
        return _computed(dy, weight, aux, epilogue)
    with torch._C._AutoDispatchBelowAutograd():
        found: Tensors = torch.ops.gemmsmith.backward_product(dy, weight, aux, epilogue.value)
        return found


def _computed(dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: str) -> Tensors:
    """The same, below tracers."""
    what, none = Epilogue(epilogue), aux.new_empty(0)
    found = by_kernel(dy, weight, aux, what)
    if found is not None:
        gradient, given, sums = found
        return gradient, none if given is None else given, none if sums is None else sums
    parts = what.backward
    assert parts is not None  # noqa: S101 - the functions below name no other
    gradient = through(parts, functions.product(Form.MATMUL, dy, weight), aux).contiguous()
    sums = functions.column_sums(gradient) if parts.bias_gradient else none
    return gradient, activated(parts, aux).contiguous() if parts.activated else none, sums


def through(parts: Backward, dh: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """The gradient of `aux` from that of the activation's value; differentiable."""
    if parts.gated:
        return torch.cat(gate_gradients(parts.activation, dh, aux), -1)
    return activations.through(parts.activation, dh, aux)


def activated(parts: Backward, aux: torch.Tensor) -> torch.Tensor:
    """The activation's value, of a gate times up; differentiable."""
    of = activations.ACTIVATIONS[parts.activation]
    if not parts.gated:
        return of(aux)
    gate, up = aux.chunk(2, -1)
    return of(gate) * up


def by_kernel(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """D, the activation's value and the bias gradient, where the epilogue has them, by one kernel.

    None where torch computes them: there is no winner, or `aux` is not packed, of D's size.
    """
    engine = functions.engine_here()
    plan = None if engine is None else engine.plan(Form.MATMUL, dy, weight, epilogue=epilogue)
    if engine is None or plan is None or not plan.accepts(aux):
        return None
    beside = plan.backward_outputs(aux)
    out = engine.run(plan, Form.MATMUL, dy, weight, beside=beside)
    return None if out is None else (out, beside.activated, beside.bias_gradient)


def chosen(
    x: torch.Tensor | Spec, weight: torch.Tensor | Spec, choices: tuple[Epilogue, ...]
) -> Epilogue | None:
    """The first of these that has a winner, of a layer with that weight.

    Args:
        x: has the leading sizes of the layer's result, and its type.
        weight: of the layer.
        choices: backward epilogues.
    """
    engine = current()
    if engine is None or len(weight.shape) != 2 or len(x.shape) < 2:
        return None
    dy = functions.contiguous(x, (*x.shape[:-1], weight.shape[0]))
    wins = (one for one in choices if engine.plan(Form.MATMUL, dy, weight, epilogue=one))
    return next(wins, None)


def tell(x: torch.Tensor, weight: torch.Tensor, choices: tuple[Epilogue, ...]) -> None:
    """Tell listeners of `telling.telling` of the first of these; x and weight as of `chosen`."""
    if choices and x.dim() >= 2 and weight.dim() == 2:
        dy = x.detach().new_empty((*x.shape[:-1], weight.shape[0]))
        telling.tell(dy, weight.detach(), choices[0])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A layer's product by its own winner. Below autograd."""
    engine, form = functions.engine_here(), Form.LINEAR if bias is None else Form.LINEAR_BIAS
    plan = None if engine is None else engine.plan(form, x, weight)
    return functions.linear_below(x, weight, bias, plan)


def gradients(
    wants_x: bool, wants_weight: bool, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of a layer's input and weight."""
    multiply = fallback.product if observers.only_torch_differentiates(dy) else functions.product
    dx = multiply(Form.MATMUL, dy, weight) if wants_x else None
    return dx, functions.weight_gradient(multiply, dy, x, weight) if wants_weight else None


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """All leading dimensions as one."""
    return tensor.reshape(-1, tensor.shape[-1])


def _fake_product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: str
) -> Tensors:
    parts, n = Epilogue(epilogue).backward, weight.shape[1]
    assert parts is not None  # noqa: S101 - the operator's schema is of such
    return (
        aux.new_empty(aux.shape),
        aux.new_empty((*dy.shape[:-1], n) if parts.activated else (0,)),
        aux.new_empty((n,) if parts.bias_gradient else (0,)),
    )


register(
    "backward_product(Tensor dy, Tensor weight, Tensor aux, str epilogue) "
    "-> (Tensor, Tensor, Tensor)",
    _computed,
    _fake_product,
)
