"""`gemmsmith.linear`: a linear layer and what follows it, in one kernel where one wins.

Where the operation has a winner (`gemmsmith.core.epilogue`), its kernel runs. Elsewhere torch's
operators follow the product. This is decided once for each size, with and without gradients: for
these the kernel also stores what the activation or a factor is applied to. The products of the
backward pass have winners of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import ACTIVATIONS, check_activation
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.functions import Decided
from gemmsmith.ops.engine.operands import present
from gemmsmith.ops.products import layer, operators
from gemmsmith.ops.products.layer import LinearFusion
from gemmsmith.ops.products.recording import is_recording, record
from gemmsmith.ops.products.registry import (
    CallWay,
    as_cast,
    autocast,
    fused_or_composed,
    register,
    wants_gradient,
)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    main_grad: torch.Tensor | None = None,
    residual_first: bool = False,
) -> torch.Tensor:
    """`column_scale[N] * activation(row_scale[...] * (x[..., K] · weight[N, K]ᵀ) + bias[N])
    + residual[..., N]`.

    Without what follows the bias, and without factors, this is `torch.nn.functional.linear`. Under
    autocast, x, weight and bias are cast as by torch; a residual is added, and factors multiply, in
    their own type.

    Kernels have an activation, or a residual with or without `column_scale`, or `row_scale` alone,
    each with or without a bias (an activation with one). With `residual_first` they have a bias, a
    residual, and then `relu` or `silu`. Of other combinations the first of these is fused, and
    torch's operators follow it.

    Args:
        x: any number of leading dimensions.
        weight: [N, K].
        bias: [N]; None adds nothing.
        activation: `gelu_tanh`, `gelu` (exact), `silu`, `relu2` (the square of ReLU), `relu` or
            `sigmoid`. Fused kernels need a bias.
        residual: of the result's size, or broadcastable to it; None adds nothing.
        column_scale: [N], such as LayerScale's; of the result's type where a kernel is to read it.
            If its gradient is needed, the kernel stores what it multiplies.
        row_scale: [...], x's leading dimensions, usually FP32, such as an RMS norm's factors; the
            result has the product's type all the same. Its gradient needs the product, which no
            kernel stores: if it is needed, torch's operators follow the product.
        main_grad: [N, K], usually FP32: the weight's gradient is added to it in the backward pass,
            and `weight.grad` is not changed, as in Megatron's gradient accumulation.
        residual_first: add the residual before the activation, as ResNet does.

    Raises:
        ValueError: there is no such activation; row_scale does not have x's leading dimensions;
            main_grad does not have the weight's shape or device, or requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if activation is not None:
        check_activation(activation)
    if row_scale is not None:
        if row_scale.shape != x.shape[:-1]:
            has, wants = tuple(row_scale.shape), tuple(x.shape[:-1])
            raise ValueError(f"row_scale must be of x's leading dimensions {wants}, got {has}")
        follows = (activation, column_scale, residual)
        if any(step is not None for step in follows):  # no kernel has it and one of these
            d = linear(x, weight, bias, row_scale=row_scale, main_grad=main_grad)
            return _follow(d, *follows, residual_first=residual_first)
    elif activation is None and column_scale is None and residual is None:
        return operators.linear(x, weight, bias, main_grad=main_grad)
    elif residual_first and activation is not None and residual is not None:
        if column_scale is not None:  # no kernel has all of it
            d = linear(x, weight, bias, residual=residual, main_grad=main_grad)
            return _follow(d, activation, column_scale, None)
    elif (column_scale if residual is None else activation) is not None:
        # Kernels add a residual after column factors, and none after an activation.
        d = linear(x, weight, bias, activation=activation, main_grad=main_grad)
        return _follow(d, None, column_scale, residual)
    call = LinearCall(x, weight, bias, residual, activation, main_grad, column_scale, row_scale)
    if is_recording():
        call.record()
    if main_grad is not None:
        operators.check_main_grad(main_grad, weight)
    return call.run()


class LinearCall(NamedTuple):
    """The arguments of the operator `fused_linear`, in its order; see `linear`.

    A residual is added before the activation, if there are both.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str | None = None
    main_grad: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """What an epilogue reads, by name."""
        return present(**{name: getattr(self, name) for name in layer.OPERANDS})

    @property
    def has_gradient(self) -> bool:
        """Whether autograd needs a gradient of any operand that has one in `FusedLinear`."""
        return wants_gradient(self.x, self.weight, self.bias, self.residual, self.column_scale)

    def epilogue(self, *, for_gradients: bool = True) -> Epilogue | None:
        """What follows the product, and what the gradients need stored, if they are computed.

        Returns None if no kernel has all of it.
        """
        if for_gradients and self.row_scale is not None and wants_gradient(self.row_scale):
            return None
        has_gradient = self.has_gradient if self.activation else wants_gradient(self.column_scale)
        return Epilogue.made_of(
            bias=self.bias is not None,
            activation=self.activation,
            residual=self.residual is not None,
            aux=for_gradients and has_gradient,
            column_scale=self.column_scale is not None,
            row_scale=self.row_scale is not None,
        )

    def record(self) -> None:
        epilogue = self.epilogue()
        if epilogue is not None:
            record(self.x, self.weight, epilogue)

    def wins(self, engine: Engine) -> bool:
        """Whether one kernel computes all of it, from the operands that autocast gives."""
        epilogue = self.epilogue()
        if epilogue is None or not functions.sizes_are_numbers(self.x, self.weight):
            return False
        plan = engine.plan(Form.LINEAR, as_cast(self.x), as_cast(self.weight), epilogue=epilogue)
        bias = None if self.bias is None else autocast(self.bias)[0]
        return plan is not None and plan.suits(self.operands | present(bias=bias))

    def lacks(self, engine: Engine) -> bool:
        """Whether it is decided that no winner computes all of it."""
        epilogue, operands = self.epilogue(), (as_cast(self.x), as_cast(self.weight))
        return epilogue is None or engine.lacks(Form.LINEAR, *operands, epilogue=epilogue)

    def saves_little(self, engine: Engine | None) -> bool:
        """Whether the kernel would save less than a layer in training costs the host."""
        trains = self.has_gradient
        return trains and layer.saves_little(engine, self.x, self.weight, self.epilogue())

    def run_if_fused(
        self, way: CallWay, engine: Engine | None, *, patched: bool = False
    ) -> torch.Tensor | None:
        """The layer by one kernel of the engine. Returns None if no winner computes all of it.

        For a layer that is patched, also if it saves little.
        """
        x, weight, epilogue = self.x, self.weight, self.epilogue()
        is_sized = way is CallWay.EAGER or functions.sizes_are_numbers(x, weight)
        if engine is None or epilogue is None or not is_sized:
            return None
        plan = engine.plan(Form.LINEAR, x, weight, epilogue=epilogue)
        # Unlike `functions.decide`, this makes no record of operands without a winner.
        if plan is None or not plan.suits(operands := self.operands):
            return None
        if patched and self.has_gradient and layer.is_slight(engine, plan):
            return None
        decided = Decided(engine, plan, Form.LINEAR, x, weight, operands)
        main_grads = (self.main_grad, None)
        fusion = LinearFusion(epilogue, tuple(operands), main_grads, decided=decided)
        return layer.run(way, x, weight, operands, fusion, has_gradient=self.has_gradient)

    def run(self) -> torch.Tensor:
        return _fused_linear(*self)


def run_composed(*arguments: Any) -> torch.Tensor:
    """The product by its own winner or by torch, then torch's operators."""
    call = LinearCall(*arguments)
    x, weight, bias, residual, activation, main_grad, column_scale, row_scale = call
    if row_scale is not None:
        product = operators.linear(x, weight, main_grad=main_grad)
        d = product * row_scale.unsqueeze(-1)  # in their type
        return (d if bias is None else d + bias).to(product.dtype)
    d = operators.linear(x, weight, bias, main_grad=main_grad)
    return _follow(d, activation, column_scale, residual, residual_first=True)


def _follow(
    d: torch.Tensor,
    activation: str | None,
    column_scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    residual_first: bool = False,
) -> torch.Tensor:
    """Torch's operators after a linear layer."""
    if residual_first and activation is not None and residual is not None:
        d, residual = d + residual, None
    if activation is not None:
        d = ACTIVATIONS[activation](d)
    if column_scale is not None:
        d = d * column_scale
    return d if residual is None else d + residual


def _compute(*arguments: Any) -> torch.Tensor:
    call = LinearCall(*arguments)
    epilogue = call.epilogue(for_gradients=False)
    if epilogue is None:
        return run_composed(*call._replace(main_grad=None)).contiguous()
    return layer.compute(call.x, call.weight, call.operands, LinearFusion(epilogue))[0].contiguous()


def fake(call: LinearCall) -> torch.Tensor:
    """`linear`'s result without data."""
    size: tuple[Any, ...] = (*call.x.shape[:-1], call.weight.shape[0])
    if call.residual is None:
        return call.x.new_empty(size)
    dtype = torch.promote_types(call.x.dtype, call.residual.dtype)
    if call.column_scale is not None:
        dtype = torch.promote_types(dtype, call.column_scale.dtype)
    whole = torch.broadcast_shapes(size, call.residual.shape)  # type: ignore[no-untyped-call]
    return call.x.new_empty(whole, dtype=dtype)


_fused_linear: Callable[..., torch.Tensor] = register(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, "
    "str? activation=None, Tensor? main_grad=None, Tensor? column_scale=None, "
    "Tensor? row_scale=None) -> Tensor",
    _compute,
    lambda *arguments: fake(LinearCall(*arguments)),
    fused_or_composed(LinearCall, run_composed),
    by_torch=run_composed,
    needs_engine=True,
    casts=3,
)
