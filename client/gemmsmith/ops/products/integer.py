"""`gemmsmith.int8_mm`: the product of INT8 matrices, and what follows it in a quantized layer."""

from __future__ import annotations

import torch

from gemmsmith.ops.engine import fallback
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import current
from gemmsmith.ops.products.registry import refuse_gradient, register


def int8_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`scale_a · scale_b · a[M, K] · b[K, N]` of INT8 operands, for every size.

    Without a winner, `torch._int_mm` runs and its result is scaled. Sizes that it refuses are
    padded with zeros.

    Args:
        a: int8; kernels take it row-major.
        b: int8; kernels take it column-major: for a weight [N, K], pass `weight.t()`.
        scale_a: [M, 1], one FP32 factor for each row of a; 1 by default.
        scale_b: [1, N], one for each column of b; 1 by default.
        out_dtype: bfloat16, or int32 for the unscaled sums, which takes no factors.

    Raises:
        ValueError: types or sizes do not match; the message names them.
        NotImplementedError: a factor requires a gradient.
    """
    _check(a, b, scale_a, scale_b, out_dtype)
    refuse_gradient("int8_mm", _ADVICE, scale_a, scale_b)
    result: torch.Tensor = _int8_mm(a, b, scale_a, scale_b, out_dtype)
    return result


_ADVICE = "quantize and scale inside an autograd function"


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise ValueError(f"a and b must be int8, got {a.dtype} and {b.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.device != b.device:
        raise ValueError(
            f"a[M, K] and b[K, N] must be matrices on one device with one K, got {tuple(a.shape)} "
            f"on {a.device} and {tuple(b.shape)} on {b.device}"
        )
    if out_dtype not in (torch.bfloat16, torch.int32):
        raise ValueError(f"out_dtype must be bfloat16 or int32, got {out_dtype}")
    factors = (("scale_a", scale_a, (a.shape[0], 1)), ("scale_b", scale_b, (1, b.shape[1])))
    for name, scale, size in factors:
        if scale is None:
            continue
        if out_dtype == torch.int32:
            raise ValueError(f"{name} needs out_dtype=bfloat16: sums in int32 are not scaled")
        if scale.dtype != torch.float32 or scale.shape != size or scale.device != a.device:
            raise ValueError(
                f"{name} must be float32 {size} on {a.device}, got {scale.dtype} "
                f"{tuple(scale.shape)} on {scale.device}"
            )


def _compute(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    engine, d, sums = current(), None, None
    if engine is None:
        return _by_torch(a, b, scale_a, scale_b, out_dtype)
    if scale_a is not None and scale_b is not None:
        # Vectors of any stride are few bytes to copy.
        factors = {"scale_a": scale_a.contiguous(), "scale_b": scale_b.contiguous()}
        d = engine.product(Form.ROW_SCALED, a, b, factors)
    elif scale_a is None and scale_b is None:
        d = engine.product(Form.MATMUL, a, b, output=out_dtype)
    if d is not None:
        return d
    if out_dtype != torch.int32:
        sums = engine.product(Form.MATMUL, a, b, output=torch.int32)
    if sums is None:
        return _by_torch(a, b, scale_a, scale_b, out_dtype)
    return fallback.scale_sums(sums, scale_a, scale_b)


def _by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    sums = fallback.int8(a, b)
    return sums if out_dtype == torch.int32 else fallback.scale_sums(sums, scale_a, scale_b)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None = None,  # noqa: ARG001 - does not change the shape
    scale_b: torch.Tensor | None = None,  # noqa: ARG001 - nor does this
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_int8_mm = register(
    "int8_mm(Tensor a, Tensor b, Tensor? scale_a=None, Tensor? scale_b=None, "
    "ScalarType out_dtype=bfloat16) -> Tensor",
    _compute,
    _fake,
    by_torch=_by_torch,
    advice=_ADVICE,
)
