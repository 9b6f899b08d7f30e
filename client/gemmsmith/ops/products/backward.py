"""A product of the backward pass, and an activation's gradient after it.

P = dY·W of the layer after an activation, and aux, what that activation was applied to, give the
gradient of aux: by one kernel where one wins (`gemmsmith.core.epilogue`), else by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemmsmith.core import activations
from gemmsmith.core.epilogue import Backward, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form, Spec
from gemmsmith.ops.products import recording
from gemmsmith.ops.products.registry import register

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""D, the activation's value, the bias gradient; empty where the epilogue gives none."""


def product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: Epilogue
) -> Tensors:
    """`dy · weight` and its epilogue, by a kernel or by torch. Below autograd."""
    if observers.unobserved() or observers.is_watched():
        return _compute(dy, weight, aux, epilogue)
    with torch._C._AutoDispatchBelowAutograd():
        outputs: Tensors = torch.ops.gemmsmith.backward_product(dy, weight, aux, epilogue.value)
        return outputs


def _compute(dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, name: str) -> Tensors:
    epilogue, none = Epilogue(name), aux.new_empty(0)
    outputs = by_kernel(dy, weight, aux, epilogue)
    if outputs is not None:
        d, value, sums = outputs
        return d, none if value is None else value, none if sums is None else sums
    parts = epilogue.backward
    assert parts is not None  # noqa: S101 - callers name backward epilogues alone
    d = through(parts, functions.product(Form.MATMUL, dy, weight), aux).contiguous()
    sums = functions.column_sums(d) if parts.bias_gradient else none
    return d, activations.activated(parts, aux).contiguous() if parts.activated else none, sums


def through(parts: Backward, dh: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    """The gradient of `aux` from the gradient of the activation's value; differentiable."""
    of_aux = activations.gradients(parts, dh, aux)
    return torch.cat(of_aux, -1) if parts.gated else of_aux[0]


def by_kernel(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """D, the activation's value and the bias gradient, where the epilogue has them, by one kernel.

    Returns None where torch must compute them: no kernel has won, or `aux` is not packed.
    """
    operands = {"aux": aux}
    decided = functions.decide(functions.engine_here(), Form.MATMUL, dy, weight, epilogue, operands)
    outputs = None if decided is None else decided.run()
    if outputs is None:
        return None
    d, written = outputs
    return d, written.get("activated"), written.get("bias_gradient")


def choose(
    engine: Engine | None,
    x: torch.Tensor | Spec,
    weight: torch.Tensor | Spec,
    choices: tuple[Epilogue, ...],
) -> Epilogue | None:
    """The first of some backward epilogues that has a winner, in a layer with that weight.

    Args:
        engine: decides.
        x: has the leading sizes of the layer's result, and its type.
        weight: of the layer.
        choices: backward epilogues.
    """
    if engine is None or len(weight.shape) != 2 or len(x.shape) < 2:
        return None
    dy = functions.contiguous(x, (*x.shape[:-1], weight.shape[0]))
    for epilogue in choices:
        if engine.plan(Form.MATMUL, dy, weight, epilogue=epilogue) is not None:
            return epilogue
    return None


def lacks(
    engine: Engine,
    x: torch.Tensor | Spec,
    weight: torch.Tensor | Spec,
    choices: tuple[Epilogue, ...],
) -> bool:
    """Whether it is decided that `choose` gives None."""
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return True
    dy = functions.contiguous(x, (*x.shape[:-1], weight.shape[0]))
    return all(engine.lacks(Form.MATMUL, dy, weight, epilogue=of) for of in choices)


def record(x: torch.Tensor, weight: torch.Tensor, choices: tuple[Epilogue, ...]) -> None:
    """Note that the first of these could follow a backward product; operands as of `choose`."""
    if choices and x.dim() >= 2 and weight.dim() == 2:
        dy = x.detach().new_empty((*x.shape[:-1], weight.shape[0]))
        recording.record(dy, weight.detach(), choices[0])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A layer by its own winner or by torch. Below autograd."""
    engine, form = functions.engine_here(), Form.LINEAR if bias is None else Form.LINEAR_BIAS
    plan = None if engine is None else engine.plan(form, x, weight)
    return functions.linear_below(engine, x, weight, bias, plan)


def gradients(
    products: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[Any],
    needs: Sequence[bool | None],
    main_grads: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """The gradients of x and of weights from those of the products x · weightᵀ.

    Args:
        products: their gradients; there may be fewer than weights.
        x: of the layer. None if no weight's gradient is needed.
        weights: of the layer. None if no gradient reads it.
        needs: which gradients are needed: that of x, then those of the weights.
        main_grads: of the weights: a gradient is added to it, and is not a result.
    """
    is_torchs = observers.only_torch_differentiates(products[0])
    multiply = fallback.product if is_torchs else functions.product
    dx: torch.Tensor | None = None
    dweights: list[torch.Tensor | None] = [None] * len(weights)
    for at, (dp, weight, main_grad) in enumerate(zip(products, weights, main_grads, strict=False)):
        if needs[0]:
            more = multiply(Form.MATMUL, dp, weight)
            dx = more if dx is None else dx + more if is_torchs else dx.add_(more)
        if needs[1 + at] and main_grad is not None:
            functions.accumulate(main_grad, dp, x)
        elif needs[1 + at]:
            dweights[at] = functions.weight_gradient(multiply, dp, x, weight)
    return dx, dweights


def _fake_product(
    dy: torch.Tensor, weight: torch.Tensor, aux: torch.Tensor, epilogue: str
) -> Tensors:
    parts, n = Epilogue(epilogue).backward, weight.shape[1]
    assert parts is not None  # noqa: S101 - callers name backward epilogues alone
    return (
        aux.new_empty(aux.shape),
        aux.new_empty((*dy.shape[:-1], n) if parts.activated else (0,)),
        aux.new_empty((n,) if parts.bias_gradient else (0,)),
    )


register(
    "backward_product(Tensor dy, Tensor weight, Tensor aux, str epilogue) "
    "-> (Tensor, Tensor, Tensor)",
    _compute,
    _fake_product,
)
