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

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import GATES, Activation, Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.operands import Operands, present
from gemmsmith.ops.products import layer, operators
from gemmsmith.ops.products.layer import LinearFusion, Pair, halves, parts
from gemmsmith.ops.products.recording import is_recording, record
from gemmsmith.ops.products.registry import (
    CallWay,
    as_cast,
    fused_or_composed,
    register,
    wants_gradient,
)


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

    def lacks(self, engine: Engine) -> bool:
        """Whether it is decided that no winner computes all of it."""
        gate, _ = parts(self.weight, self.up, self.interleaved)
        operands, epilogue = (as_cast(self.x), as_cast(gate)), self.epilogue()
        return self.bias is not None or engine.lacks(Form.LINEAR, *operands, epilogue=epilogue)

    def saves_little(self, engine: Engine | None) -> bool:
        """Whether the kernel would save less than a layer in training costs the host."""
        if not wants_gradient(self.x, self.weight, self.up):
            return False
        gate, _ = parts(self.weight, self.up, self.interleaved)
        return layer.saves_little(engine, self.x, gate, self.epilogue())

    def run_if_fused(
        self, way: CallWay, engine: Engine | None, *, patched: bool = False
    ) -> torch.Tensor | None:
        """As of `LinearCall`."""
        x, weight, up = self.x, self.weight, self.up
        is_sized = way is CallWay.EAGER or functions.sizes_are_numbers(x, weight, up)
        if self.bias is not None or not is_sized:
            return None
        aux = wants_gradient(x, weight, up)
        epilogue = EPILOGUES[self.activation, aux]
        operands: Operands = {} if up is None else {"up": up}
        interleaved, main_grads = self.interleaved, (self.main_grad, self.up_main_grad)
        decided = layer.decide(engine, x, weight, operands, epilogue, interleaved=interleaved)
        if decided is None:
            return None
        if patched and aux and layer.is_slight(decided.engine, decided.plan):
            return None
        fusion = LinearFusion(epilogue, tuple(operands), main_grads, interleaved, decided)
        return layer.run(way, x, weight, operands, fusion, has_gradient=aux)

    def run(self) -> torch.Tensor:
        return _gated_linear(*self)


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


def _compute(*arguments: Any) -> torch.Tensor:
    call = GatedCall(*arguments)
    if call.bias is not None:
        return run_composed(*call._replace(main_grad=None, up_main_grad=None)).contiguous()
    fusion = LinearFusion(EPILOGUES[call.activation, False], interleaved=call.interleaved)
    return layer.compute(call.x, call.weight, present(up=call.up), fusion)[0].contiguous()


def _fake(
    x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor | None = None, *_: Any
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if up is None else 1)))


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
