"""`gemmsmith.gated_linear`: SwiGLU, GeGLU and similar layers, in one kernel where one wins.

Gate and up are two products of the same x. Where the operation has a winner
(`gemmsmith.core.epilogue`), one kernel reads x once, multiplies it with both and stores only the
gated result. Elsewhere torch's operators follow the products. For gradients the kernel also stores
gate and up, the gate first whatever the weight's order. The backward pass needs nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from gemmsmith.core.activations import ACTIVATIONS, FUNCTIONS, through
from gemmsmith.core.epilogue import GATES, Activation, Epilogue
from gemmsmith.ops.engine import fallback, functions, observers
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.functions import Decided
from gemmsmith.ops.products import operators
from gemmsmith.ops.products.recording import is_recording, record
from gemmsmith.ops.products.registry import CallWay, register, wants_gradient

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
    call = GatedCall(
        x, weight, up, bias, activation, interleaved, *_main_grads(main_grad, weight, up)
    )
    if is_recording() and bias is None:
        gate, _ = parts(weight, up, interleaved)
        record(x, gate, call.epilogue())
    result: torch.Tensor = _gated_linear(*call)
    return result


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
        return gate_epilogue(self.activation, aux=wants_gradient(self.x, self.weight, self.up))


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
    if isinstance(main_grad, torch.Tensor):
        operators.check_main_grad(main_grad, weight)
        return main_grad, None
    for of_weight in main_grad:
        operators.check_main_grad(of_weight, weight)
    return main_grad


def parts(whole: torch.Tensor, up: torch.Tensor | None, interleaved: bool = False) -> Pair:
    """The gate's rows and up's."""
    if up is not None:
        return whole, up
    if interleaved:
        return whole[0::2], whole[1::2]
    half = whole.shape[0] // 2
    return whole[:half], whole[half:]


def halves(both: torch.Tensor, interleaved: bool) -> Pair:
    """The gate's columns and up's."""
    return (both[..., 0::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)  # type: ignore[return-value]


def gate_epilogue(activation: str, *, aux: bool) -> Epilogue:
    """The epilogue of one of `GATES`; `aux`: it stores gate and up."""
    epilogue = Epilogue.made_of(activation=activation, gate=True, aux=aux)
    assert epilogue is not None  # noqa: S101 - each of GATES has both
    return epilogue


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


def run_if_fused(way: CallWay, engine: Engine | None, call: GatedCall) -> torch.Tensor | None:
    """The layer by one kernel of the engine. Returns None if no winner computes all of it."""
    x, weight, up = call.x, call.weight, call.up
    if call.bias is not None:
        return None
    weights = (weight,) if up is None else (weight, up)
    if way is not CallWay.EAGER and not functions.sizes_are_numbers(x, *weights):
        return None
    epilogue = call.epilogue()
    decided = decide(engine, x, weights, epilogue, call.interleaved)
    if decided is None:
        return None
    main_grads = (call.main_grad, call.up_main_grad)
    fusion = GatedFusion(epilogue, call.interleaved, main_grads, decided)
    if not epilogue.stores_aux:
        return run_fused(x, weight, up, fusion)[0]
    d: torch.Tensor = GatedLinear.apply(x, weight, up, fusion)[0]  # type: ignore[no-untyped-call]
    return d


def decide(
    engine: Engine | None,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    epilogue: Epilogue,
    interleaved: bool,
) -> Decided | None:
    """See `functions.decide`. `weights` is the whole weight, or the gate's and up's."""
    if torch.is_grad_enabled():  # autograd would note the slices of a weight
        weights = tuple(weight.detach() for weight in weights)
    gate, up = weights if len(weights) == 2 else parts(weights[0], None, interleaved)
    return functions.decide(engine, Form.LINEAR, x, gate, epilogue, {"up": up})


def _autograd(way: CallWay, engine: Engine | None, *arguments: Any) -> torch.Tensor:
    d = run_if_fused(way, engine, GatedCall(*arguments))
    return run_composed(*arguments) if d is None else d


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
        weights = (weight,) if up is None else (weight, up)
        engine = functions.engine_here()
        decided = decide(engine, x, weights, fusion.epilogue, fusion.interleaved)
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
        """D, and aux."""
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
    fusion = GatedFusion(gate_epilogue(call.activation, aux=False), call.interleaved)
    return _run(call.x, call.weight, call.up, fusion)[0].contiguous()


def _compute_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    interleaved: bool,
    epilogue: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    d, aux = _run(x, weight, up, GatedFusion(Epilogue(epilogue), interleaved))
    return d, x.new_empty(0) if aux is None else aux


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
) -> tuple[torch.Tensor, torch.Tensor]:
    d = _fake(x, weight, up)
    whole = (*x.shape[:-1], 2 * d.shape[-1])
    return d, x.new_empty(whole if Epilogue(epilogue).stores_aux else (0,))


_gated_linear = register(
    "gated_linear(Tensor x, Tensor weight, Tensor? up=None, Tensor? bias=None, "
    "str activation='silu', bool interleaved=False, Tensor? main_grad=None, "
    "Tensor? up_main_grad=None) -> Tensor",
    _compute,
    _fake,
    _autograd,
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
