"""`gemmsmith.gated_linear`: SwiGLU, GeGLU and similar layers, in one kernel where one wins.

Gate and up are two products of the same x. Where the operation has a winner
(`gemmsmith.core.epilogue`), one kernel reads x once, multiplies it with both and stores only the
gated result. Elsewhere torch's operators follow the products. For gradients the kernel also stores
gate and up, the gate first whatever the weight's order. The backward pass needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, FUNCTIONS, gate_gradients
from gemmsmith.core.epilogue import GATES, Activation, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.functions import Decided
from gemmsmith.ops.products import operators
from gemmsmith.ops.products.recording import is_recording, record
from gemmsmith.ops.products.registry import (
    CallWay,
    as_cast,
    fused_or_composed,
    register,
    wants_gradient,
)

Pair = tuple[torch.Tensor, torch.Tensor]
"""Gate, then up."""

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""D, and aux if it is stored."""


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
        activation: of the gate: `silu` (SwiGLU), `gelu_tanh` or `gelu` (GeGLU), `relu`, `sigmoid`.
        interleaved: even rows of the weight are the gate's, odd rows are up's.
        main_grad: of the weight's size, usually FP32: the weight's gradient is added to it in the
            backward pass, and `weight.grad` is not changed; with two weights, a pair.

    Raises:
        ValueError: there is no such activation; the weight cannot be halved; two weights are
            interleaved or differ in size; main_grad does not match the weights.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    check(weight, up, activation, interleaved=interleaved)
    main_grads = _main_grads(main_grad, weight, up)
    call = GatedCall(x, weight, up, bias, activation, interleaved, *main_grads)
    if is_recording():
        call.record()
    return call.run()


class GatedCall(NamedTuple):
    """The arguments of the operator `gated_linear`, in its order."""

    x: torch.Tensor
    weight: torch.Tensor
    up: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str = Activation.SILU.value
    interleaved: bool = False
    main_grad: torch.Tensor | None = None
    up_main_grad: torch.Tensor | None = None

    def epilogue(self) -> Epilogue:
        """The gate's, which stores gate and up if a gradient needs them."""
        return EPILOGUES[self.activation, wants_gradient(self.x, self.weight, self.up)]

    def record(self) -> None:
        if self.bias is None:
            gate, _ = parts(self.weight, self.up, self.interleaved)
            record(self.x, gate, self.epilogue())

    def wins(self, engine: Engine) -> bool:
        """Whether one kernel computes all of it, from the operands that autocast gives."""
        gate, up = parts(self.weight, self.up, self.interleaved)
        if not functions.lie_alike(gate, up) or not functions.sizes_are_numbers(self.x, gate):
            return False
        operands = (as_cast(self.x), as_cast(gate))
        return engine.plan(Form.LINEAR, *operands, epilogue=self.epilogue()) is not None

    def run_if_fused(self, way: CallWay, engine: Engine | None) -> torch.Tensor | None:
        """The layer by one kernel of the engine. Returns None if no winner computes all of it."""
        x, weight, up = self.x, self.weight, self.up
        is_sized = way is CallWay.EAGER or functions.sizes_are_numbers(x, weight, up)
        if self.bias is not None or not is_sized:
            return None
        aux = wants_gradient(x, weight, up)
        epilogue = EPILOGUES[self.activation, aux]
        gate, raised = parts(weight, up, self.interleaved)
        decided = functions.decide(engine, Form.LINEAR, x, gate, epilogue, {"up": raised})
        if decided is None:
            return None
        main_grads = (self.main_grad, self.up_main_grad)
        fusion = GatedFusion(epilogue, self.interleaved, main_grads, decided)
        if not aux:
            return (_run if way is CallWay.EAGER else run_fused)(x, weight, up, fusion)[0]
        d: torch.Tensor = GatedLinear.apply(x, weight, up, fusion)[0]  # type: ignore[no-untyped-call]
        return d

    def run(self) -> torch.Tensor:
        return _gated_linear(*self)


class GatedFusion(NamedTuple):
    """How a gated layer is computed.

    Attributes:
        epilogue: the gate's, with or without aux.
        interleaved: as of `gated_linear`.
        main_grads: of the weights, as of `gated_linear`.
        decided: None: it is decided where the layer is computed.
    """

    epilogue: Epilogue
    interleaved: bool = False
    main_grads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    decided: Decided | None = None


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
    if main_grad is None:
        return None, None
    if (up is None) is not isinstance(main_grad, torch.Tensor):
        raise ValueError("main_grad must be one tensor of one weight, and a pair of two weights")
    main_grads = (main_grad,) if isinstance(main_grad, torch.Tensor) else main_grad
    for of_weight in main_grads:
        operators.check_main_grad(of_weight, weight)
    return main_grads if len(main_grads) == 2 else (*main_grads, None)


def parts(whole: torch.Tensor, up: torch.Tensor | None, interleaved: bool = False) -> Pair:
    """The gate's rows and up's, without gradients: autograd would note the slices."""
    if torch.is_grad_enabled():
        whole, up = whole.detach(), None if up is None else up.detach()
    if up is not None:
        return whole, up
    if interleaved:
        return whole[0::2], whole[1::2]
    half = whole.shape[0] // 2
    return whole[:half], whole[half:]


def halves(both: torch.Tensor, interleaved: bool) -> Pair:
    """The gate's columns and up's."""
    return (both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)  # type: ignore[return-value]


EPILOGUES: dict[tuple[str, bool], Epilogue] = {
    (epilogue.activation, epilogue.stores_aux): epilogue
    for epilogue in Epilogue
    if epilogue.is_gated and epilogue.activation is not None
}
"""By the gate's activation, and by whether gate and up are stored."""


def run_composed(*arguments: Any) -> torch.Tensor:
    """The products by their own winners or by torch, then torch's operators."""
    x, weight, up, bias, activation, interleaved, main_grad, up_main_grad = GatedCall(*arguments)
    if up is None:
        both = operators.linear(x, weight, bias, main_grad=main_grad)
        gate, raised = halves(both, interleaved)
    else:
        first, second = (None, None) if bias is None else bias.chunk(2)
        gate = operators.linear(x, weight, first, main_grad=main_grad)
        raised = operators.linear(x, up, second, main_grad=up_main_grad)
    return ACTIVATIONS[activation](gate) * raised


def run_fused(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, fusion: GatedFusion
) -> Outputs:
    """The layer without a bias, by a kernel or by torch. Below autograd."""
    if observers.unobserved():
        return _run(x, weight, up, fusion)
    if observers.is_watched():
        return _run_by_torch(x, weight, up, fusion)
    with torch._C._AutoDispatchBelowAutograd():
        outputs: Outputs = torch.ops.gemmsmith.gated_product(
            x, weight, up, fusion.interleaved, fusion.epilogue.value
        )
        return outputs


def _run(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, fusion: GatedFusion
) -> Outputs:
    decided = fusion.decided
    if decided is None:
        engine = functions.engine_here()
        gate, raised = parts(weight, up, fusion.interleaved)
        decided = functions.decide(engine, Form.LINEAR, x, gate, fusion.epilogue, {"up": raised})
    outputs = None if decided is None else decided.run()
    if outputs is None:
        return _run_by_torch(x, weight, up, fusion)
    return outputs[0], outputs[1].get("aux")


def _run_by_torch(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None, fusion: GatedFusion
) -> Outputs:
    epilogue, interleaved = fusion.epilogue, fusion.interleaved
    assert epilogue.activation is not None  # noqa: S101 - every gate has one
    # One product where the weight is whole: torch's own way.
    both = functional.linear(x, weight)
    gate, raised = halves(both, interleaved) if up is None else (both, functional.linear(x, up))
    d = ACTIVATIONS[epilogue.activation](gate) * raised
    if not epilogue.stores_aux:
        return d, None
    return d, both.contiguous() if up is None and not interleaved else torch.cat([gate, raised], -1)


class GatedLinear(torch.autograd.Function):
    """`gated_linear` in one kernel; its gradients by torch's pointwise kernels and products.

    Gives gate and up as well, so that gradients of gradients need no more than is kept.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Outputs:
        x, weight, up, fusion = arguments
        d, aux = run_fused(x, weight, up, fusion)
        needs_x, *needs_weights = ctx.needs_input_grad[:3]
        weights = (weight, up) if needs_x else (None, None)
        ctx.save_for_backward(x if any(needs_weights) else None, *weights, aux)
        ctx.fusion, ctx.is_joined = fusion._replace(decided=None), up is None
        ctx.set_materialize_grads(False)
        return d, aux

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of x and the weights, which are added to their main_grads, if these are set."""
        dy: Any
        daux: Any
        dy, daux = (None if grad is None else observers.dense(grad) for grad in grads)
        if dy is None and daux is None:
            return (None,) * 4
        x, weight, up, aux = ctx.saved_tensors
        fusion: GatedFusion = ctx.fusion
        activation: Any = fusion.epilogue.activation
        interleaved = fusion.interleaved
        is_torchs = observers.only_torch_differentiates(dy if daux is None else daux)
        if ctx.is_joined and daux is None and not is_torchs and observers.unobserved():
            products = [(_joined_in_place(activation, dy, aux, interleaved), weight)]
        else:
            pair: Any = None if dy is None else gate_gradients(activation, dy, aux)
            if daux is not None:
                halves = daux.chunk(2, -1)
                pair = halves if pair is None else (pair[0] + halves[0], pair[1] + halves[1])
            products = list(zip(pair, (weight, up), strict=True))
            if ctx.is_joined:
                products = [(_joined(pair, interleaved), weight)]
        multiply = fallback.product if is_torchs else functions.product
        dx: torch.Tensor | None = None
        dweights: list[torch.Tensor | None] = [None, None]
        for i, (dp, rows) in enumerate(products):
            if ctx.needs_input_grad[0]:
                part = multiply(Form.MATMUL, dp, rows)
                dx = part if dx is None else dx + part
            if not ctx.needs_input_grad[1 + i]:
                continue
            main_grad = fusion.main_grads[i]
            if main_grad is not None:
                functions.accumulate(main_grad, dp, x)
            else:
                dweights[i] = multiply(Form.WEIGHT_GRADIENT, dp, x)
        return dx, *dweights, None


def _joined(pair: Pair, interleaved: bool) -> torch.Tensor:
    """Both gradients in the order of one weight's rows, [..., 2·I]."""
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def _joined_in_place(
    activation: Activation, dy: torch.Tensor, aux: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """The same of `dy`'s, each gradient written where it belongs; not differentiable."""
    gate, up = aux.chunk(2, -1)
    out = torch.empty_like(aux)
    of_gate, of_up = halves(out, interleaved)
    function = FUNCTIONS[activation]
    value = function.value(gate)
    torch.mul(dy, value, out=of_up)
    function.write_gradient(dy * up, gate, value, of_gate)
    return out


def _compute(*arguments: Any) -> torch.Tensor:
    call = GatedCall(*arguments)
    if call.bias is not None:
        return run_composed(*call._replace(main_grad=None, up_main_grad=None)).contiguous()
    fusion = GatedFusion(EPILOGUES[call.activation, False], call.interleaved)
    return _run(call.x, call.weight, call.up, fusion)[0].contiguous()


def _compute_product(
    x: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    up, interleaved, epilogue = others
    d, aux = _run(x, weight, up, GatedFusion(Epilogue(epilogue), interleaved))
    return d, x.new_empty(0) if aux is None else aux


def _fake(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None, *_: Any
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if up is None else 1)))


def _fake_product(
    x: torch.Tensor, weight: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    up, _, epilogue = others
    d = _fake(x, weight, up)
    whole = (*x.shape[:-1], 2 * d.shape[-1])
    return d, x.new_empty(whole if Epilogue(epilogue).stores_aux else (0,))


_gated_linear: Callable[..., torch.Tensor] = register(
    "gated_linear(Tensor x, Tensor weight, Tensor? up=None, Tensor? bias=None, "
    "str activation='silu', bool interleaved=False, Tensor? main_grad=None, "
    "Tensor? up_main_grad=None) -> Tensor",
    _compute,
    _fake,
    fused_or_composed(GatedCall, run_composed),
    by_torch=run_composed,
    needs_engine=True,
    casts=4,
)
register(
    "gated_product(Tensor x, Tensor weight, Tensor? up, bool interleaved, str epilogue) "
    "-> (Tensor, Tensor)",
    _compute_product,
    _fake_product,
)
