"""`gemmsmith.scaled_gated_linear`: gate and up of FP8 operands, whose result may be FP8 as well.

All but the product is as in `gemmsmith.ops.products.scaled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import gated, scaled
from gemmsmith.ops.products.layer import halves, parts
from gemmsmith.ops.products.recording import Multiplied
from gemmsmith.ops.products.registry import refuse_gradient, register
from gemmsmith.ops.products.scaled import ADVICE, FP8, Output


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
    call = ScaledGatedCall(
        *(x, weight, scale_x, scale_weight, up, activation, interleaved, out_dtype, out_scale),
        *(amax, use_fast_accum),
    )
    scaled.check(x, scale_x, scale_weight, call.output)
    refuse_gradient("scaled_gated_linear", ADVICE, *call)
    result: torch.Tensor = _scaled_gated_linear(*call)
    return result


class ScaledGatedCall(NamedTuple):
    """The arguments of the operator `scaled_gated_linear`, in its order."""

    x: torch.Tensor
    weight: torch.Tensor
    scale_x: torch.Tensor
    scale_weight: torch.Tensor
    up: torch.Tensor | None
    activation: str
    interleaved: bool
    out_dtype: torch.dtype
    out_scale: torch.Tensor | None
    amax: torch.Tensor | None
    use_fast_accum: bool

    @property
    def output(self) -> Output:
        return Output(self.out_dtype, self.out_scale, self.amax)


def run_composed(*arguments: Any) -> torch.Tensor:
    """The products by their own winners or by torch, then torch's operators."""
    call = ScaledGatedCall(*arguments)
    x, weight, scale_x, scale_weight, up, *_ = call
    gate = scaled.multiply(x, weight, scale_x, scale_weight, None, call.use_fast_accum)
    if up is not None:
        raised = scaled.multiply(x, up, scale_x, scale_weight, None, call.use_fast_accum)
    else:
        gate, raised = halves(gate, call.interleaved)
    return call.output.of(ACTIVATIONS[call.activation](gate) * raised)


def _compute(*arguments: Any) -> torch.Tensor:
    call = ScaledGatedCall(*arguments)
    gate, raised = parts(call.weight, call.up, call.interleaved)
    form = Form.scaled(by_rows=False, fast=call.use_fast_accum)
    product = (call.x, gate, call.scale_x, call.scale_weight)
    epilogue = gated.EPILOGUES[call.activation, False]
    d = call.output.run(form, product, epilogue, {"up": raised.t()})
    return run_composed(*call) if d is None else d


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    rows = weight.shape[0] // (2 if others[2] is None else 1)
    return x.new_empty((*x.shape[:-1], rows), dtype=others[5])


def products(arguments: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call multiplies: the bare products, then the fused one."""
    call = ScaledGatedCall(**arguments)
    form = Form.scaled(by_rows=False, fast=call.use_fast_accum)
    for rows in (call.weight, call.up):
        if rows is not None:
            yield Multiplied(form, call.x, rows.t())
    gate, _ = parts(call.weight, call.up, call.interleaved)
    output = FP8 if call.output.is_fp8 else None
    epilogue = gated.EPILOGUES[call.activation, False]
    yield Multiplied(form, call.x, gate.t(), output, epilogue)


_scaled_gated_linear = register(
    "scaled_gated_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, "
    "Tensor? up, str activation, bool interleaved, ScalarType out_dtype, Tensor? out_scale, "
    "Tensor(a!)? amax, bool use_fast_accum) -> Tensor",
    _compute,
    _fake,
    by_torch=run_composed,
    advice=ADVICE,
)
