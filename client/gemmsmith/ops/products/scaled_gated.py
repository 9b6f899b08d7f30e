"""`gemmsmith.scaled_gated_linear`: gate and up of FP8 operands, whose result may be FP8 as well.

All but the product is as in `gemmsmith.ops.products.scaled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gemmsmith.core.activations import ACTIVATIONS
from gemmsmith.core.epilogue import Activation, Epilogue
from gemmsmith.ops.engine import observers
from gemmsmith.ops.engine.beside import Beside
from gemmsmith.ops.engine.engine import current
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.products import gated, scaled
from gemmsmith.ops.products.registry import ours, register, without_gradient
from gemmsmith.ops.products.scaled import ADVICE, FP8, Output
from gemmsmith.ops.products.telling import Multiplied


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
    scaled.check(x, scale_x, scale_weight, Output(out_dtype, out_scale, amax))
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
    scaled.refuse_gradient("scaled_gated_linear", *arguments)
    observed = torch.compiler.is_compiling() or not observers.unobserved()
    if observed and ours(x, weight, scale_x, scale_weight, up, out_scale, amax):
        result: torch.Tensor = torch.ops.gemmsmith.scaled_gated_linear(*arguments)
        return result
    return _compute(*arguments)


def _compute(
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
    """The devices' part: also what an eager call does. Without a kernel the steps are torch's."""
    output = Output(out_dtype, out_scale, amax)
    operands = (x, weight, scale_x, scale_weight, up, out_scale, amax)
    engine = current() if ours(*operands) else None
    form = Form.scaled(by_rows=False, fast=use_fast_accum)
    epilogue = Epilogue.made_of(activation=activation, gate=True)
    if engine is not None and epilogue is not None:
        gate, raised = (one.t() for one in gated.parts(weight, up, interleaved))
        plan = engine.plan(form, x, gate, FP8 if output.is_fp8 else None, epilogue=epilogue)
        if plan is not None and plan.pairs(gate, raised):
            beside = Beside(up=raised)
            if output.is_fp8:
                beside = Beside(up=raised, scale_d=out_scale, amax=amax)
            out = engine.run(plan, form, x, gate, scale_x, scale_weight, beside=beside)
            if out is not None:
                return out if output.is_fp8 else output.of(out)
    first = scaled.multiplied(x, weight, scale_x, scale_weight, None, use_fast_accum)
    if up is not None:
        second = scaled.multiplied(x, up, scale_x, scale_weight, None, use_fast_accum)
    elif interleaved:
        first, second = first[..., 0::2], first[..., 1::2]
    else:
        first, second = first.chunk(2, -1)
    return output.of(ACTIVATIONS[activation](first) * second)


def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    rows = weight.shape[0] // (2 if others[2] is None else 1)
    return x.new_empty((*x.shape[:-1], rows), dtype=others[5])


def products(given: dict[str, Any]) -> Iterator[Multiplied]:
    """What a call multiplies, by its arguments: the bare products, then the fused one."""
    x, weight, up = given["x"], given["weight"], given["up"]
    form = Form.scaled(by_rows=False, fast=given["use_fast_accum"])
    for one in (weight, up):
        if one is not None:
            yield Multiplied(form, x, one.t())
    epilogue = Epilogue.made_of(activation=given["activation"], gate=True)
    gate, _ = gated.parts(weight, up, given["interleaved"])
    if epilogue is not None:
        output = FP8 if given["out_dtype"] is FP8 else None
        yield Multiplied(form, x, gate.t(), output, epilogue)


register(
    "scaled_gated_linear(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight, "
    "Tensor? up, str activation, bool interleaved, ScalarType out_dtype, Tensor? out_scale, "
    "Tensor(a!)? amax, bool use_fast_accum) -> Tensor",
    _compute,
    _fake,
    without_gradient("scaled_gated_linear", ADVICE),
)
