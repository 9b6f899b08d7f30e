"""`gemmsmith.scaled_linear` and `scaled_gated_linear`: layers of FP8 operands.

Their results may be FP8 as well.

Where the operation has a winner (`gemmsmith.core.operation`: `out_e4m3`), one kernel computes the
product, what follows it, the FP8 result with its factor, and on demand its largest value. Elsewhere
torch's operators follow the product. Both round to FP8 with saturation: torch's own cast does not,
so a clamp precedes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import ACTIVATIONS, check_activation
from gemmsmith.core.epilogue import Activation, Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.operands import Operands, present
from gemmsmith.ops.products import gated, operators
from gemmsmith.ops.products.layer import halves, parts
from gemmsmith.ops.products.recording import Multiplied
from gemmsmith.ops.products.registry import refuse_gradient, register

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
ADVICE = "call it inside an autograd function that casts to FP8"


class Output(NamedTuple):
    """What a layer's value becomes.

    Attributes:
        dtype: of the result.
        scale: factor of an FP8 result, 1 by default.
        amax: becomes the larger one of itself and of the value's largest absolute value.
    """

    dtype: torch.dtype
    scale: torch.Tensor | None
    amax: torch.Tensor | None

    @property
    def is_fp8(self) -> bool:
        """Whether a kernel writes the result itself."""
        return self.dtype is FP8

    def run(
        self,
        form: Form,
        product: Sequence[torch.Tensor],
        epilogue: Epilogue,
        operands: Operands,
    ) -> torch.Tensor | None:
        """The result by one kernel. Returns None if no winner computes all of it.

        Args:
            form: which product.
            product: x[..., K], the weight [N, K], and their factors.
            epilogue: what follows the product.
            operands: what the epilogue reads.
        """
        x, weight, scale_a, scale_b = product
        operands = {**operands, "scale_a": scale_a, "scale_b": scale_b}
        if self.is_fp8:
            operands |= present(scale_d=self.scale, amax=self.amax)
        output = FP8 if self.is_fp8 else None
        engine = current()
        decided = functions.decide(engine, form, x, weight.t(), epilogue, operands, output)
        outputs = None if decided is None else decided.run()
        if outputs is None:
            return None
        return outputs[0] if self.is_fp8 else self.of(outputs[0])

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The result of a value in bf16, by torch's operators."""
        if self.amax is not None and value.numel():
            self.amax.copy_(torch.maximum(self.amax, value.abs().amax()))
        if not self.is_fp8:
            return value
        wide = value.float() if self.scale is None else value.float() * self.scale
        return wide.clamp(-LARGEST, LARGEST).to(FP8)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """`activation(scale_x · scale_weight · x[..., K] · weight[N, K]ᵀ + bias[N])`: [..., N].

    Args:
        x: E4M3, any number of leading dimensions.
        weight: E4M3, [N, K].
        scale_x: one FP32 element on the operands' device, by which x's values are multiplied.
        scale_weight: the same for weight's.
        bias: [N] of bf16; None adds nothing. Fused kernels need one.
        activation: `gelu_tanh`, `gelu` (exact), `silu` or `relu2` (the square of ReLU).
        out_dtype: `torch.bfloat16` or `torch.float8_e4m3fn`.
        out_scale: one FP32 element by which an FP8 result is multiplied before it is rounded with
            saturation at 448; 1 by default.
        amax: one FP32 element, in place of which the larger one of it and of the largest absolute
            value of the result before `out_scale` is written; a NaN counts as the largest. Zero it
            when a new interval begins.
        use_fast_accum: sums may stay in the tensor core, with fewer bits than FP32 (`scaled_mm`).

    Raises:
        ValueError: there is no such activation or `out_dtype`; a factor or `amax` is not one FP32
            element on the operands' device; `out_scale` of a result that is not FP8.
        NotImplementedError: an operand requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if activation is not None:
        check_activation(activation)
    call = ScaledCall(
        *(x, weight, scale_x, scale_weight, bias, None, activation, None),
        *(out_dtype, out_scale, amax, use_fast_accum),
    )
    check(x, scale_x, scale_weight, call.output)
    return _scaled_linear(call)


def scaled_gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """`activation(s · x · gateᵀ) * (s · x · upᵀ)`, s = `scale_x · scale_weight`: [..., K] to
    [..., I].

    Args:
        x: E4M3, any number of leading dimensions.
        weight: E4M3, [2·I, K], the gate's rows before up's; only the gate's [I, K] if `up` is
            given.
        scale_x: one FP32 element on the operands' device, by which x's values are multiplied.
        scale_weight: the same for those of gate and up.
        up: E4M3, [I, K].
        activation: of the gate: `silu` (SwiGLU), `gelu_tanh` or `gelu` (GeGLU), `relu`, `sigmoid`.
        interleaved: even rows of the weight are the gate's, odd rows are up's.
        out_dtype: as of `scaled_linear`.
        out_scale: as of `scaled_linear`.
        amax: as of `scaled_linear`.
        use_fast_accum: as of `scaled_linear`.

    Raises:
        ValueError: as `scaled_linear`; the weight cannot be halved; two weights are interleaved or
            differ in size.
        NotImplementedError: an operand requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    gated.check(weight, up, activation, interleaved=interleaved)
    call = ScaledCall(
        *(x, weight, scale_x, scale_weight, None, up, activation, interleaved),
        *(out_dtype, out_scale, amax, use_fast_accum),
    )
    check(x, scale_x, scale_weight, call.output)
    return _scaled_gated_linear(call)


class ScaledCall(NamedTuple):
    """The arguments of the operators `scaled_linear` and `scaled_gated_linear`, in their order.

    The first has no `up` and no `interleaved`, which is None. The second has no bias.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale_x: torch.Tensor
    scale_weight: torch.Tensor
    bias: torch.Tensor | None
    up: torch.Tensor | None
    activation: str | None
    interleaved: bool | None
    out_dtype: torch.dtype
    out_scale: torch.Tensor | None
    amax: torch.Tensor | None
    use_fast_accum: bool

    @property
    def output(self) -> Output:
        return Output(self.out_dtype, self.out_scale, self.amax)

    @property
    def form(self) -> Form:
        return Form.scaled(by_rows=False, fast=self.use_fast_accum)

    @property
    def epilogue(self) -> Epilogue | None:
        """What follows the product. Returns None if no kernel has all of it."""
        gate = self.interleaved is not None
        return Epilogue.made_of(bias=self.bias is not None, activation=self.activation, gate=gate)

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """That of the fused product, and up's."""
        if self.interleaved is None:
            return self.weight, None
        return parts(self.weight, self.up, self.interleaved)

    def composed(self) -> torch.Tensor:
        """The products by their own winners or by torch, then torch's operators."""
        value = self._multiply(self.weight, self.bias)
        activate = None if self.activation is None else ACTIVATIONS[self.activation]
        if activate is not None and self.interleaved is not None:
            if self.up is None:
                gate, raised = halves(value, self.interleaved)
            else:
                gate, raised = value, self._multiply(self.up)
            value = activate(gate) * raised
        elif activate is not None:
            value = activate(value)
        return self.output.of(value)

    def _multiply(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product in bf16, by its own winner or by torch."""
        x, fast = self.x.reshape(-1, self.x.shape[-1]), self.use_fast_accum
        scales = (self.scale_x, self.scale_weight)
        out = operators.scaled_mm(x, weight.t(), *scales, bias, use_fast_accum=fast)
        return out.view(*self.x.shape[:-1], weight.shape[0])

    def compute(self) -> torch.Tensor:
        """By one kernel, or composed."""
        epilogue, (weight, up) = self.epilogue, self.weights
        d = None
        if epilogue not in (None, Epilogue.NONE):
            operands: Any = {"bias": self.bias} if up is None else {"up": up.t()}
            product = (self.x, weight, self.scale_x, self.scale_weight)
            d = self.output.run(self.form, product, epilogue, operands)
        return self.composed() if d is None else d

    def fake(self) -> torch.Tensor:
        weight, _ = self.weights
        return self.x.new_empty((*self.x.shape[:-1], weight.shape[0]), dtype=self.out_dtype)


def check(
    x: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor, output: Output
) -> None:
    """Raises ValueError as `scaled_linear` does of factors and output."""
    if output.dtype not in (torch.bfloat16, FP8):
        raise ValueError(f"out_dtype must be torch.bfloat16 or {FP8}, got {output.dtype}")
    if output.scale is not None and not output.is_fp8:
        raise ValueError(f"out_scale is of a result in {FP8}; out_dtype is {output.dtype}")
    scalars = present(
        scale_x=scale_x, scale_weight=scale_weight, out_scale=output.scale, amax=output.amax
    )
    for name, scalar in scalars.items():
        if scalar.dtype != torch.float32 or scalar.numel() != 1 or scalar.device != x.device:
            raise ValueError(
                f"{name} must be one float32 element on {x.device}, got {scalar.numel()} of "
                f"{scalar.dtype} on {scalar.device}"
            )


def products(arguments: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call multiplies: the bare products, then the fused one."""
    call = ScaledCall._make(map(arguments.get, ScaledCall._fields))
    for rows in (call.weight, call.up):
        if rows is not None:
            yield Multiplied(call.form, call.x, rows.t())
    weight, _ = call.weights
    if call.epilogue not in (None, Epilogue.NONE):
        output = FP8 if call.output.is_fp8 else None
        yield Multiplied(call.form, call.x, weight.t(), output, call.epilogue)


def _registered(
    schema: str, of: Callable[..., ScaledCall], *absent: str
) -> Callable[[ScaledCall], torch.Tensor]:
    """What runs an operator, which has the arguments of `ScaledCall` but for the `absent`.

    `of` makes the record of its arguments.
    """
    name = schema.partition("(")[0]
    places = [at for at, field in enumerate(ScaledCall._fields) if field not in absent]
    run = register(
        schema,
        lambda *arguments: of(*arguments).compute(),
        lambda *arguments: of(*arguments).fake(),
        by_torch=lambda *arguments: of(*arguments).composed(),
        advice=ADVICE,
    )

    def call(arguments: ScaledCall) -> torch.Tensor:
        refuse_gradient(name, ADVICE, *arguments)
        d: torch.Tensor = run(*[arguments[at] for at in places])
        return d

    return call


_scaled_linear = _registered(
    "scaled_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor? bias, "
    "str? activation, ScalarType out_dtype, Tensor? out_scale, Tensor(a!)? amax, "
    "bool use_fast_accum) -> Tensor",
    lambda *values: ScaledCall._make((*values[:5], None, values[5], None, *values[6:])),
    *("up", "interleaved"),
)
_scaled_gated_linear = _registered(
    "scaled_gated_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, "
    "Tensor? up, str activation, bool interleaved, ScalarType out_dtype, Tensor? out_scale, "
    "Tensor(a!)? amax, bool use_fast_accum) -> Tensor",
    lambda *values: ScaledCall._make((*values[:4], None, *values[4:])),
    "bias",
)
