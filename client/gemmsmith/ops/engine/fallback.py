"""Torch's own operators for every form: they run where no tuned kernel does."""

from __future__ import annotations

import torch
from torch.nn import functional

from gemmsmith.ops.engine.forms import Form


def product(form: Form, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of a form without bias and scales, differentiable."""
    match form:
        case Form.LINEAR:
            return functional.linear(a, b)
        case Form.WEIGHT_GRADIENT:
            return a.reshape(-1, a.shape[-1]).t() @ b.reshape(-1, b.shape[-1])
        case _:
            return torch.matmul(a, b)


def accumulate(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`into += aᵀ · b` over all leading dimensions, in place, summed in `into`'s type."""
    left, right = a.reshape(-1, a.shape[-1]).t(), b.reshape(-1, b.shape[-1])
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    elif into.is_cuda and into.dtype == torch.float32 and left.dtype in _NARROW:
        # cuBLAS with FP32 output and beta = 1: the product is never rounded to 16 bits.
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
    else:
        into.addmm_(left.to(into.dtype), right.to(into.dtype))


_NARROW = (torch.bfloat16, torch.float16)

_INT_MM_ROWS = 17
"""The least M that `torch._int_mm` takes on CUDA."""
_INT_MM_MULTIPLE = 8
"""K and N must be multiples of this."""


def int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of int8 matrices in int32, by `torch._int_mm`, which needs some sizes padded."""
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, k, n):
        return a.new_zeros((m, n), dtype=torch.int32)
    fits = m >= _INT_MM_ROWS and k % _INT_MM_MULTIPLE == n % _INT_MM_MULTIPLE == 0
    return torch._int_mm(a, b) if fits or not a.is_cuda else padded_int8(a, b)


def padded_int8(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same with rows and columns of zeros, for the time of the product."""
    (m, k), n = a.shape, b.shape[1]
    depth, columns = -k % _INT_MM_MULTIPLE, -n % _INT_MM_MULTIPLE
    left = functional.pad(a, (0, depth, 0, max(_INT_MM_ROWS - m, 0)))
    right = functional.pad(b.t(), (0, depth, 0, columns)).t()
    return torch._int_mm(left, right)[:m, :n].contiguous()


def scale_sums(
    sums: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None
) -> torch.Tensor:
    """int32 sums in bf16, times a factor per row and one per column, rounded once."""
    out = sums.float()
    for scale in (scale_a, scale_b):
        if scale is not None:
            out.mul_(scale)
    return out.to(torch.bfloat16)


def scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """`torch._scaled_mm`, or a bf16 product for sizes or strides that cuBLAS refuses."""
    if torch_scales(a, b):
        return scaled_by_torch(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    # FP8 values are exact in bf16, and the sums are in FP32 either way.
    out = (a.to(torch.bfloat16) @ b.to(torch.bfloat16)).float().mul_(scale_a).mul_(scale_b)
    return (out if bias is None else out + bias).to(out_dtype)


def torch_scales(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether cuBLAS takes FP8 operands of these sizes and strides."""
    k, n = b.shape
    columns_first = a.stride(1) == 1 and b.stride(0) == 1
    fits = k % 16 == 0 and n % 16 == 0 and a.stride(0) % 16 == 0 and b.stride(1) % 16 == 0
    return 0 not in (*a.shape, n) and columns_first and fits


def scaled_by_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """`torch._scaled_mm` with its own errors."""
    return torch._scaled_mm(
        a,
        b,
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
