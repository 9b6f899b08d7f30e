"""`gemmsmith.gated_linear`: SwiGLU, GeGLU and their like, in one kernel where one wins.

Gate and up are two products of the same x. Where the operation has a winner
(`gemmsmith.core.epilogue`), one kernel reads x once, multiplies it with both and stores the gated
result alone; else torch's own steps follow whatever computes the products. With a gradient wanted,
gate and up are stored as well, gate first whatever the weight's order, and nothing else is kept for
the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, through
from gemmsmith.core.epilogue import GATES, Activation, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.engine import Engine, current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import operators, telling
from gemmsmith.ops.products.registry import ours, register, wants_gradient

Pair = tuple[torch.Tensor, torch.Tensor]
"""Gate, then up."""


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    main_grad: torch.Tensor | Pair | None = None,
) -> torch.Tensor:
    """`activation(x · gateᵀ) * (x · upᵀ)`: [..., K] to [..., I].

    Under autocast, x, weights and bias are cast as by torch's `linear`.

    Args:
        x: any number of leading dimensions.
        weight: [2·I, K], the gate's rows before up's; only the gate's [I, K] if `up` is given.
        up: [I, K].
        bias: [2·I], in the order of the weight's rows; with two weights the gate's first. None adds
            nothing. No kernel has a bias yet, so torch's operators run.
        activation: of the gate: `silu` (SwiGLU), `gelu_tanh` or `gelu` (GeGLU).
        interleaved: even rows of the weight are the gate's, odd rows are up's.
        main_grad: of the weight's size, usually FP32: the weight's gradient is added to it in the
            backward pass, and `weight.grad` is not changed; with two weights, a pair.

    Raises:
        ValueError: there is no such activation; the weight cannot be halved; two weights are
            interleaved or differ in size; main_grad does not match the weights.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    check(weight, up, activation, interleaved=interleaved)
    of_gate, of_up = _main_grads(main_grad, weight, up)
    if telling.is_told():
        wanted = wants_gradient(x, weight, up, bias)
        if bias is None:
            telling.tell(x, parts(weight, up, interleaved)[0], _epilogue(activation, aux=wanted))
    arguments = (x, weight, up, bias, activation, interleaved, of_gate, of_up)
    if current() is None or not ours(x, weight, up, bias, of_gate, of_up):
        return _composed(*arguments)
    if torch.compiler.is_compiling() or not observers.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.gated_linear(*arguments)
        return result
    if torch.is_autocast_enabled(x.device.type):
        return _autocast(*arguments)
    return _autograd(*arguments)


def check(
    weight: torch.Tensor, up: torch.Tensor | None, activation: str, *, interleaved: bool
) -> None:
    """Raises ValueError as `gated_linear` does."""
    if activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(GATES)}, got {activation!r}")
    if up is not None and interleaved:
        raise ValueError("interleaved is of one weight; up is given, so there are two")
    if up is not None and up.shape != weight.shape:
        raise ValueError(f"up must be {list(weight.shape)}, like weight, got {list(up.shape)}")
    if weight.dim() != 2 or (up is None and weight.shape[0] % 2):
        raise ValueError(f"weight must be [2 * I, K], or [I, K] with up, got {list(weight.shape)}")


def _main_grads(
    main_grad: torch.Tensor | Pair | None, weight: torch.Tensor, up: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One for each weight."""
    if main_grad is None:
        return None, None
    if (up is None) is not isinstance(main_grad, torch.Tensor):
        raise ValueError("main_grad must be one tensor of one weight, and a pair of two weights")
    if isinstance(main_grad, torch.Tensor):
        operators.check_main_grad(main_grad, weight)
        return main_grad, None
    of_gate, of_up = main_grad
    for one in (of_gate, of_up):
        operators.check_main_grad(one, weight)
    return of_gate, of_up


def parts(whole: torch.Tensor, up: torch.Tensor | None, interleaved: bool = False) -> Pair:
    """The gate's rows and up's."""
    if up is not None:
        return whole, up
    if interleaved:
        return whole[0::2], whole[1::2]
    half = whole.shape[0] // 2
    return whole[:half], whole[half:]


def _epilogue(activation: str, *, aux: bool) -> Epilogue:
    """What kernels call it; `aux`: gate and up are wanted too."""
    found = Epilogue.made_of(activation=activation, gate=True, aux=aux)
    assert found is not None  # noqa: S101 - each of GATES has both
    return found


def _composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    main_grad: torch.Tensor | None,
    up_main_grad: torch.Tensor | None,
) -> torch.Tensor:
    """The products by whoever computes them, then torch's steps."""
    if up is None:
        both = operators.linear(x, weight, bias, main_grad=main_grad)
        gate, raised = both[..., 0::2], both[..., 1::2]
        if not interleaved:
            half = weight.shape[0] // 2
            gate, raised = both[..., :half], both[..., half:]
    else:
        first, second = (None, None) if bias is None else bias.chunk(2)
        gate = operators.linear(x, weight, first, main_grad=main_grad)
        raised = operators.linear(x, up, second, main_grad=up_main_grad)
    return ACTIVATIONS[activation](gate) * raised


def _autograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    main_grad: torch.Tensor | None = None,
    up_main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    engine = current()
    weights = [weight] if up is None else [weight, up]
    wanted = wants_gradient(x, *weights)
    if bias is None and engine is not None and functions.sizes_are_numbers(x, *weights):
        epilogue = _epilogue(activation, aux=wanted)
        gate, raised = parts(weight.detach(), None if up is None else up.detach(), interleaved)
        plan = engine.plan(Form.LINEAR, x, gate, epilogue=epilogue)
        if plan is not None and plan.pairs(gate, raised):
            if not wanted:
                return with_aux(x, weight, up, interleaved, epilogue)[0]
            out: torch.Tensor = GatedLinear.apply(  # type: ignore[no-untyped-call]
                x, weight, up, interleaved, epilogue, main_grad, up_main_grad
            )[0]
            return out
    return _composed(x, weight, up, bias, activation, interleaved, main_grad, up_main_grad)


def _autocast(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *others: Any,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight, up, bias = (operators.cast(one, dtype) for one in (x, weight, up, bias))
    return _autograd(x, weight, up, bias, *others)


def with_aux(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    interleaved: bool,
    epilogue: Epilogue,
) -> Pair:
    """D, and aux (empty where none is stored), by a kernel or by torch. Below autograd."""
    if observers.unobserved() or observers.is_watched():
        return _computed(x, weight, up, interleaved, epilogue)
    with torch._C._AutoDispatchBelowAutograd():
        found: Pair = torch.ops.gemmsmith.gated_product(x, weight, up, interleaved, epilogue.value)
        return found


def _computed(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    interleaved: bool,
    epilogue: str,
) -> Pair:
    """The same, below tracers."""
    what, engine = Epilogue(epilogue), functions.engine_here()
    gate, raised = parts(weight, up, interleaved)
    if engine is not None:
        found = _by_kernel(engine, x, gate, raised, what)
        if found is not None:
            out, aux = found
            return out, x.new_empty(0) if aux is None else aux
    assert what.activation is not None  # noqa: S101 - every gate has one
    # One product where the weight is whole: torch's own way.
    both = functional.linear(x, weight)
    first, second = (
        (both, functional.linear(x, raised))
        if up is not None
        else ((both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1))
    )
    out = ACTIVATIONS[what.activation](first) * second
    if not what.stores_aux:
        return out, x.new_empty(0)
    whole = up is None and not interleaved
    return out, both.contiguous() if whole else torch.cat([first, second], -1)


def _by_kernel(
    engine: Engine, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """D and aux, where it is stored, by one tuned kernel; None where torch computes them."""
    plan = engine.plan(Form.LINEAR, x, gate, epilogue=epilogue)
    if plan is None or not plan.pairs(gate, up):
        return None
    beside = Beside(aux=plan.empty_aux() if epilogue.stores_aux else None, up=up)
    out = engine.run(plan, Form.LINEAR, x, gate, beside=beside)
    return None if out is None else (out, beside.aux)


class GatedLinear(torch.autograd.Function):
    """`gated_linear` in one kernel; its gradients by torch's pointwise kernels and products.

    Gives gate and up as well, so that gradients of gradients need no more than is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        up: torch.Tensor | None,
        interleaved: bool,
        epilogue: Epilogue,
        main_grad: torch.Tensor | None,
        up_main_grad: torch.Tensor | None,
    ) -> Pair:
        """D, and aux."""
        out, aux = with_aux(x, weight, up, interleaved, epilogue)
        wants_x, *wants_weights = ctx.needs_input_grad[:3]
        weights = (weight, up) if wants_x else (None, None)
        ctx.save_for_backward(x if any(wants_weights) else None, *weights, aux)
        ctx.interleaved, ctx.activation = interleaved, epilogue.activation
        ctx.main_grads, ctx.is_joined = (main_grad, up_main_grad), up is None
        ctx.set_materialize_grads(False)
        return out, aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x and the weights (into their main_grads, if there are any)."""
        dy: Any
        daux: Any
        dy, daux = (None if grad is None else observers.dense(grad) for grad in grads)
        if dy is None and daux is None:
            return (None,) * 7
        x, weight, up, aux = ctx.saved_tensors
        again = observers.only_torch_differentiates(dy if daux is None else daux)
        if ctx.is_joined and daux is None and not again and observers.unobserved():
            products = [(_joined_in_place(ctx.activation, dy, aux, ctx.interleaved), weight)]
        else:
            pair: Any = None if dy is None else gate_gradients(ctx.activation, dy, aux)
            if daux is not None:
                halves = daux.chunk(2, -1)
                pair = halves if pair is None else (pair[0] + halves[0], pair[1] + halves[1])
            products = list(zip(pair, (weight, up), strict=True))
            if ctx.is_joined:
                products = [(_joined(pair, ctx.interleaved), weight)]
        multiply = fallback.product if again else functions.product
        dx: torch.Tensor | None = None
        dweights: list[torch.Tensor | None] = [None, None]
        for i, (dp, rows) in enumerate(products):
            if ctx.needs_input_grad[0]:
                part = multiply(Form.MATMUL, dp, rows)
                dx = part if dx is None else dx + part
            if not ctx.needs_input_grad[1 + i]:
                continue
            if ctx.main_grads[i] is not None:
                functions.accumulate(ctx.main_grads[i], dp, x)
            else:
                dweights[i] = multiply(Form.WEIGHT_GRADIENT, dp, x)
        return dx, *dweights, None, None, None, None


def gate_gradients(activation: Activation, dy: torch.Tensor, aux: torch.Tensor) -> Pair:
    """Gradients of gate and up from that of `activation(gate) * up`, [..., I] each; differentiable.

    Args:
        activation: of the gate.
        dy: [..., I].
        aux: [..., 2·I]: gate, then up.
    """
    gate, up = aux.chunk(2, -1)
    return through(activation, dy * up, gate), dy * ACTIVATIONS[activation](gate)


def _joined(pair: Pair, interleaved: bool) -> torch.Tensor:
    """Both gradients in the order of one weight's rows, [..., 2·I]."""
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def _joined_in_place(
    activation: Activation, dy: torch.Tensor, aux: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The same of `dy`'s, each gradient written where it belongs; not differentiable."""
    gate, up = aux.chunk(2, -1)
    out = torch.empty_like(aux)
    of_gate, of_up = (out[..., 0::2], out[..., 1::2]) if interleaved else out.chunk(2, -1)
    torch.mul(dy, ACTIVATIONS[activation](gate), out=of_up)
    aten = torch.ops.aten
    match activation:
        case Activation.SILU:
            aten.silu_backward.grad_input(dy * up, gate, grad_input=of_gate)
        case Activation.GELU_TANH:
            aten.gelu_backward.grad_input(dy * up, gate, approximate="tanh", grad_input=of_gate)
        case _:
            aten.gelu_backward.grad_input(dy * up, gate, grad_input=of_gate)
    return out


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    main_grad: torch.Tensor | None = None,  # noqa: ARG001 - the gradient's affair
    up_main_grad: torch.Tensor | None = None,  # noqa: ARG001 - likewise
) -> torch.Tensor:
    if bias is not None:
        found = _composed(x, weight, up, bias, activation, interleaved, None, None)
    else:
        found = _computed(x, weight, up, interleaved, _epilogue(activation, aux=False))[0]
    return found.contiguous()


def _fake(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None, *_: Any
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if up is None else 1)))


def _fake_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    interleaved: bool,  # noqa: ARG001 - does not change the shape
    epilogue: str,
) -> Pair:
    out = _fake(x, weight, up)
    whole = (*x.shape[:-1], 2 * out.shape[-1])
    return out, x.new_empty(whole if Epilogue(epilogue).stores_aux else (0,))


register(
    "gated_linear(Tensor x, Tensor weight, Tensor? up=None, Tensor? bias=None, "
    "str activation='silu', bool interleaved=False, Tensor? main_grad=None, "
    "Tensor? up_main_grad=None) -> Tensor",
    _compute,
    _fake,
    _autograd,
    _autocast,
)
register(
    "gated_product(Tensor x, Tensor weight, Tensor? up, bool interleaved, str epilogue) "
    "-> (Tensor, Tensor)",
    _computed,
    _fake_product,
)
