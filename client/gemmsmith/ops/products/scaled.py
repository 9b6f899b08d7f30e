"""`gemmsmith.scaled_linear`: a layer of FP8 operands, whose result may be FP8 as well.

With an FP8 result, one kernel computes the product, what follows it, the result's factor, and on
demand its largest value, where the operation has a winner (`gemmsmith.core.operation`: `out_e4m3`).
Else the steps after the product are torch's. Either rounds to FP8 with saturation: torch's own cast
does not, so a clamp precedes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import ACTIVATIONS, check_activation
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import operators
from gemmsmith.ops.products.registry import (
    ours,
    register,
    wants_gradient,
    without_gradient,
)
from gemmsmith.ops.products.telling import Multiplied

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
ADVICE = "call it inside an autograd function that casts to FP8"


class Output(NamedTuple):
    """What a layer's value becomes.

    Attributes:
        dtype: of the result.
        scale: factor of an FP8 result; None: 1.
        amax: what the value's largest absolute value is added to.
    """

    dtype: torch.dtype
    scale: torch.Tensor | None
    amax: torch.Tensor | None

    @property
    def is_fp8(self) -> bool:
        """Whether a kernel may finish it."""
        return self.dtype is FP8

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
        scale_weight: likewise, weight's.
        bias: [N] of bf16; None adds nothing. Fused kernels need one.
        activation: `gelu_tanh`, `gelu` (exact), `silu` or `relu2` (the square of ReLU); None: none.
        out_dtype: `torch.bfloat16` or `torch.float8_e4m3fn`.
        out_scale: one FP32 element by which an FP8 result is multiplied before it is rounded with
            saturation at 448; None: 1.
        amax: one FP32 element, in place of which the larger one of it and of the largest absolute
            value of the result before `out_scale` is written; a NaN counts as the largest. Zero it
            when a new interval begins. None: nothing is computed.
        use_fast_accum: sums may stay in the tensor core, with fewer bits than FP32 (`scaled_mm`).

    Raises:
        ValueError: there is no such activation or `out_dtype`; a factor or `amax` is not one FP32
            element on the operands' device; `out_scale` of a result that is not FP8.
        NotImplementedError: an operand requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    if activation is not None:
        check_activation(activation)
    check(x, scale_x, scale_weight, Output(out_dtype, out_scale, amax))
    arguments = (
        x,
        weight,
        scale_x,
        scale_weight,
        bias,
        activation,
        out_dtype,
        out_scale,
        amax,
        use_fast_accum,
    )
    refuse_gradient("scaled_linear", *arguments)
    observed = torch.compiler.is_compiling() or not observers.unobserved()
    if observed and ours(x, weight, scale_x, scale_weight, bias, out_scale, amax):
        result: torch.Tensor = torch.ops.gemmsmith.scaled_linear(*arguments)
        return result
    return _compute(*arguments)


def check(
    x: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor, output: Output
) -> None:
    """Raises ValueError as `scaled_linear` does of factors and output."""
    if output.dtype not in (torch.bfloat16, FP8):
        raise ValueError(f"out_dtype must be torch.bfloat16 or {FP8}, got {output.dtype}")
    if output.scale is not None and not output.is_fp8:
        raise ValueError(f"out_scale is of a result in {FP8}; out_dtype is {output.dtype}")
    for name, one in (
        ("scale_x", scale_x),
        ("scale_weight", scale_weight),
        ("out_scale", output.scale),
        ("amax", output.amax),
    ):
        if one is None:
            continue
        if one.dtype != torch.float32 or one.numel() != 1 or one.device != x.device:
            raise ValueError(
                f"{name} must be one float32 element on {x.device}, got {one.numel()} of "
                f"{one.dtype} on {one.device}"
            )


def refuse_gradient(name: str, *arguments: object) -> None:
    """Raises NotImplementedError where one of these wants a gradient."""
    if wants_gradient(*arguments):
        raise NotImplementedError(f"{name} has no gradient: {ADVICE}")


def multiplied(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The product in bf16, by whoever computes it."""
    out = operators.scaled_mm(
        x.reshape(-1, x.shape[-1]),
        weight.t(),
        scale_x,
        scale_weight,
        bias,
        use_fast_accum=use_fast_accum,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    out_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    """The devices' part: also what an eager call does. Without a kernel the steps are torch's."""
    output = Output(out_dtype, out_scale, amax)
    operands = (x, weight, scale_x, scale_weight, bias, out_scale, amax)
    engine = current() if ours(*operands) else None
    epilogue = Epilogue.made_of(bias=bias is not None, activation=activation)
    if engine is not None and epilogue is not None and bias is not None:
        found = engine.fused(
            Form.scaled(by_rows=False, fast=use_fast_accum),
            x,
            weight.t(),
            epilogue,
            bias,
            None,
            scale_x,
            scale_weight,
            output=FP8 if output.is_fp8 else None,
            scale_d=out_scale,
            amax=amax if output.is_fp8 else None,
        )
        if found is not None:
            return found[0] if output.is_fp8 else output.of(found[0])
    value = multiplied(x, weight, scale_x, scale_weight, bias, use_fast_accum)
    return output.of(value if activation is None else ACTIVATIONS[activation](value))


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=others[4])


def products(given: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call multiplies, by its arguments: the bare product, then the fused one."""
    form, b = Form.scaled(by_rows=False, fast=given["use_fast_accum"]), given["weight"].t()
    output = FP8 if given["out_dtype"] is FP8 else None
    epilogue = Epilogue.made_of(bias=given["bias"] is not None, activation=given["activation"])
    yield Multiplied(form, given["x"], b)
    if epilogue not in (None, Epilogue.NONE):
        yield Multiplied(form, given["x"], b, output, epilogue)


register(
    "scaled_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor? bias, "
    "str? activation, ScalarType out_dtype, Tensor? out_scale, Tensor(a!)? amax, "
    "bool use_fast_accum) -> Tensor",
    _compute,
    _fake,
    without_gradient("scaled_linear", ADVICE),
)
