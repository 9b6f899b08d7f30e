"""`gemmsmith.scaled_linear` and `scaled_gated_linear`: layers of FP8 operands, and of FP8 results.

With an FP8 result, one kernel computes the product, what follows it, the result's factor, and on
demand its largest value, where the operation has a winner (`gemmsmith.operation`: `out_e4m3`). Else
the steps after the product are torch's. Either rounds to FP8 with saturation: torch's own cast does
not, so a clamp precedes it.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.activations import ACTIVATIONS, check_activation
from gemmsmith.epilogue import Activation, Epilogue
from gemmsmith.ops.engine import functions
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.plan import Beside
from gemmsmith.ops.products import gated, operators
from gemmsmith.ops.products.registry import (
    all_ours,
    register,
    wants_gradient,
    without_gradient,
)

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_ADVICE = "call it inside an autograd function that casts to FP8"


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
    _check(x, scale_x, scale_weight, out_dtype, out_scale, amax)
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
    _refuse_gradient("scaled_linear", *arguments)
    if not all_ours(x, weight, bias):
        return _linear_composed(*arguments)
    if torch.compiler.is_compiling() or not functions.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.scaled_linear(*arguments)
        return result
    return _linear(*arguments)


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
        scale_weight: likewise, those of gate and up.
        up: E4M3, [I, K].
        activation: of the gate: `silu` (SwiGLU), `gelu_tanh` or `gelu` (GeGLU).
        interleaved: even rows of the weight are the gate's, odd rows are up's.
        out_dtype: as of `scaled_linear`.
        out_scale: likewise.
        amax: likewise.
        use_fast_accum: likewise.

    Raises:
        ValueError: as `scaled_linear`; the weight cannot be halved; two weights are interleaved or
            differ in size.
        NotImplementedError: an operand requires a gradient.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    gated.check(weight, up, activation, interleaved=interleaved)
    _check(x, scale_x, scale_weight, out_dtype, out_scale, amax)
    arguments = (
        x,
        weight,
        scale_x,
        scale_weight,
        up,
        activation,
        interleaved,
        out_dtype,
        out_scale,
        amax,
        use_fast_accum,
    )
    _refuse_gradient("scaled_gated_linear", *arguments)
    if not all_ours(x, weight, up):
        return _gated_composed(*arguments)
    if torch.compiler.is_compiling() or not functions.unobserved():
        result: torch.Tensor = torch.ops.gemmsmith.scaled_gated_linear(*arguments)
        return result
    return _gated(*arguments)


def _check(
    x: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    out_dtype: torch.dtype,
    out_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> None:
    """Raises ValueError as `scaled_linear` does."""
    if out_dtype not in (torch.bfloat16, FP8):
        raise ValueError(f"out_dtype must be torch.bfloat16 or {FP8}, got {out_dtype}")
    if out_scale is not None and out_dtype is not FP8:
        raise ValueError(f"out_scale is of a result in {FP8}; out_dtype is {out_dtype}")
    for name, one in (
        ("scale_x", scale_x),
        ("scale_weight", scale_weight),
        ("out_scale", out_scale),
        ("amax", amax),
    ):
        if one is None:
            continue
        if one.dtype != torch.float32 or one.numel() != 1 or one.device != x.device:
            raise ValueError(
                f"{name} must be one float32 element on {x.device}, got {one.numel()} of "
                f"{one.dtype} on {one.device}"
            )


def _refuse_gradient(name: str, *arguments: object) -> None:
    if wants_gradient(*arguments):
        raise NotImplementedError(f"{name} has no gradient: {_ADVICE}")


def _form(use_fast_accum: bool) -> Form:
    return Form.SCALED if use_fast_accum else Form.SCALED_PRECISE


def _finished(
    value: torch.Tensor,
    out_dtype: torch.dtype,
    out_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> torch.Tensor:
    """The result of its value in 16 bits, by torch's operators."""
    if amax is not None and value.numel():
        amax.copy_(torch.maximum(amax, value.abs().amax()))
    if out_dtype is not FP8:
        return value
    wide = value.float() if out_scale is None else value.float() * out_scale
    return wide.clamp(-_LARGEST, _LARGEST).to(FP8)


def _multiplied(
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


def _linear_composed(
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
    value = _multiplied(x, weight, scale_x, scale_weight, bias, use_fast_accum)
    if activation is not None:
        value = ACTIVATIONS[activation](value)
    return _finished(value, out_dtype, out_scale, amax)


def _gated_composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    interleaved: bool,
    out_dtype: torch.dtype,
    out_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    use_fast_accum: bool,
) -> torch.Tensor:
    first = _multiplied(x, weight, scale_x, scale_weight, None, use_fast_accum)
    if up is not None:
        second = _multiplied(x, up, scale_x, scale_weight, None, use_fast_accum)
    elif interleaved:
        first, second = first[..., 0::2], first[..., 1::2]
    else:
        first, second = first.chunk(2, -1)
    return _finished(ACTIVATIONS[activation](first) * second, out_dtype, out_scale, amax)


# The devices' part: also what an eager call does.


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    engine = current()
    epilogue = Epilogue.made_of(bias=bias is not None, activation=activation)
    if engine is not None and epilogue is not None and bias is not None:
        stores_fp8 = out_dtype is FP8
        found = engine.fused(
            _form(use_fast_accum),
            x,
            weight.t(),
            epilogue,
            bias,
            None,
            scale_x,
            scale_weight,
            output=FP8 if stores_fp8 else None,
            scale_d=out_scale,
            amax=amax if stores_fp8 else None,
        )
        if found is not None:
            return found[0] if stores_fp8 else _finished(found[0], out_dtype, None, amax)
    return _linear_composed(
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


def _gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    up: torch.Tensor | None = None,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    engine, form = current(), _form(use_fast_accum)
    epilogue = Epilogue.made_of(activation=activation, gate=True)
    stores_fp8 = out_dtype is FP8
    if engine is not None and epilogue is not None:
        gate, raised = (one.t() for one in gated.parts(weight, up, interleaved))
        plan = engine.plan(form, x, gate, FP8 if stores_fp8 else None, epilogue=epilogue)
        if plan is not None and plan.pairs(gate, raised):
            told = (out_scale, amax) if stores_fp8 else (None, None)
            beside = Beside(up=raised, scale_d=told[0], amax=told[1])
            out = engine.run(plan, form, x, gate, scale_x, scale_weight, beside=beside)
            if out is not None:
                return out if stores_fp8 else _finished(out, out_dtype, None, amax)
    return _gated_composed(
        x,
        weight,
        scale_x,
        scale_weight,
        up,
        activation,
        interleaved,
        out_dtype,
        out_scale,
        amax,
        use_fast_accum,
    )


# Shapes alone, for whoever traces.


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=others[4])


def _fake_gated(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    rows = weight.shape[0] // (2 if others[2] is None else 1)
    return x.new_empty((*x.shape[:-1], rows), dtype=others[5])


register(
    "scaled_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, Tensor? bias, "
    "str? activation, ScalarType out_dtype, Tensor? out_scale, Tensor(a!)? amax, "
    "bool use_fast_accum) -> Tensor",
    _linear,
    _fake_linear,
    without_gradient("scaled_linear", _ADVICE),
)
register(
    "scaled_gated_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, "
    "Tensor? up, str activation, bool interleaved, ScalarType out_dtype, Tensor? out_scale, "
    "Tensor(a!)? amax, bool use_fast_accum) -> Tensor",
    _gated,
    _fake_gated,
    without_gradient("scaled_gated_linear", _ADVICE),
)
