"""`gemmsmith.scaled_linear`: a layer of FP8 operands, whose result may be FP8 as well.

Where the operation has a winner (`gemmsmith.core.operation`: `out_e4m3`), one kernel computes the
product, what follows it, the FP8 result with its factor, and on demand its largest value. Elsewhere
torch's operators follow the product. Both round to FP8 with saturation: torch's own cast does not,
so a clamp precedes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import ACTIVATIONS, check_activation
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.engine.operands import Operands, present
from gemmsmith.ops.products import operators
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
        *(x, weight, scale_x, scale_weight, bias, activation, out_dtype, out_scale, amax),
        use_fast_accum,
    )
    check(x, scale_x, scale_weight, call.output)
    refuse_gradient("scaled_linear", ADVICE, *call)
    result: torch.Tensor = _scaled_linear(*call)
    return result


class ScaledCall(NamedTuple):
    """The arguments of the operator `scaled_linear`, in its order."""

    x: torch.Tensor
    weight: torch.Tensor
    scale_x: torch.Tensor
    scale_weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None
    out_dtype: torch.dtype
    out_scale: torch.Tensor | None
    amax: torch.Tensor | None
    use_fast_accum: bool

    @property
    def output(self) -> Output:
        return Output(self.out_dtype, self.out_scale, self.amax)


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


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The product in bf16, by its own winner or by torch."""
    out = operators.scaled_mm(
        x.reshape(-1, x.shape[-1]),
        weight.t(),
        scale_x,
        scale_weight,
        bias,
        use_fast_accum=use_fast_accum,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def run_composed(*arguments: Any) -> torch.Tensor:
    """The product by its own winner or by torch, then torch's operators."""
    call = ScaledCall(*arguments)
    value = multiply(*call[:5], call.use_fast_accum)
    if call.activation is not None:
        value = ACTIVATIONS[call.activation](value)
    return call.output.of(value)


def _compute(*arguments: Any) -> torch.Tensor:
    call = ScaledCall(*arguments)
    epilogue = Epilogue.made_of(bias=call.bias is not None, activation=call.activation)
    if epilogue is None or call.bias is None:
        return run_composed(*call)
    form = Form.scaled(by_rows=False, fast=call.use_fast_accum)
    d = call.output.run(form, call[:4], epilogue, present(bias=call.bias))
    return run_composed(*call) if d is None else d


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=others[4])


def products(arguments: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call multiplies: the bare product, then the fused one."""
    call = ScaledCall(**arguments)
    form, b = Form.scaled(by_rows=False, fast=call.use_fast_accum), call.weight.t()
    epilogue = Epilogue.made_of(bias=call.bias is not None, activation=call.activation)
    yield Multiplied(form, call.x, b)
    if epilogue not in (None, Epilogue.NONE):
        yield Multiplied(form, call.x, b, FP8 if call.output.is_fp8 else None, epilogue)


_scaled_linear = register(
    "scaled_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor? bias, "
    "str? activation, ScalarType out_dtype, Tensor? out_scale, Tensor(a!)? amax, "
    "bool use_fast_accum) -> Tensor",
    _compute,
    _fake,
    by_torch=run_composed,
    advice=ADVICE,
)
