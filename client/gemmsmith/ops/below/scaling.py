"""torch's FP8 products by tuned kernels: unchanged code that calls `torch._scaled_mm`.

`_scaled_mm` and `_scaled_mm_v2`, each also with `out=`, multiply FP8 matrices with an FP32 factor
for each operand, or for each row of A and column of B. Products in bf16 run kernels where they have
winners, with a factor for each operand also with a bias. A call without `use_fast_accum` only runs
kernels that promote their sums to FP32. Other factors (blocks, MX), other outputs and
`scale_result` are torch's.

As in `experts`, the overrides are below autograd, work in every thread, and are installed once and
switched on and off. Graphs that Inductor compiles use them too: they call the operators with
`out=`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.below.blocks import Weights
from gemmsmith.ops.below.overriding import Overrides
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import SCALED_TYPES, Form
from gemmsmith.ops.engine.in_use import in_use
from gemmsmith.ops.engine.operands import present

TENSORS, ROWS = 0, 1
"""at::blas::ScalingType TensorWise and RowWise, of `_scaled_mm_v2` and `_scaled_grouped_mm_v2`."""


def recipe(
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
) -> int | None:
    """How both operands are scaled. Returns None for other scalings, also nested or swizzled."""
    alone = len(recipe_a) == len(scale_a) == len(scale_b) == 1
    if list(recipe_a) != list(recipe_b) or not alone or any(swizzle_a) or any(swizzle_b):
        return None
    return recipe_a[0]


def scales_rows(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> bool | None:
    """Whether the factors are those of rows and columns. torch decides it by their sizes, too.

    Returns False for a factor of each operand. Returns None for other sizes, or if the factors are
    not FP32 on the device.

    Args:
        a: [M, K].
        b: [K, N].
        scale_a: one element, or [M, 1].
        scale_b: one element, or [1, N].
    """
    for scale in (scale_a, scale_b):
        if scale.dtype != torch.float32 or scale.device != a.device:
            return None
    if scale_a.numel() == scale_b.numel() == 1:
        return False
    by_rows = scale_a.shape == (*a.shape[:1], 1) and scale_b.shape == (1, *b.shape[1:])
    return True if by_rows else None


def by_kernel(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast: bool,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The product in bf16. Returns None if torch must compute it.

    Args:
        engine: decides.
        a: [M, K].
        b: [K, N], column-major.
        scale_a: one contiguous element, or [M, 1].
        scale_b: one contiguous element, or [1, N].
        bias: [N]; only beside one factor for each operand.
        fast: whether sums may stay in the tensor core.
        into: where to write; by default a new tensor.
    """
    by_rows = scales_rows(a, b, scale_a, scale_b)
    if by_rows is None:
        return None
    if not (scale_a.is_contiguous() and scale_b.is_contiguous()):
        if not engine.is_invariant:
            return None
        scale_a, scale_b = scale_a.contiguous(), scale_b.contiguous()
    form = Form.scaled(by_rows=by_rows, fast=fast)
    epilogue = Epilogue.NONE if bias is None else Epilogue.BIAS
    if bias is not None and engine.plan(form, a, b, epilogue=epilogue) is None:
        return None
    operands = present(scale_a=scale_a, scale_b=scale_b, bias=bias, d=into)
    return engine.product(form, a, b, operands, epilogue=epilogue)


def takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's own FP8 product of these is replaced at present."""
    if (a.dtype, b.dtype) not in SCALED_TYPES or a.dim() != 2 or b.dim() != 2:
        return False
    return in_use() is not None and _overrides.blocks.hold(a, b)


def on(kind: str, only: Weights | None) -> AbstractContextManager[None]:
    return _overrides.on(kind, only)


def _scaled(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    if out_dtype is None:  # torch's result has A's type, or that of `out`
        out_dtype = a.dtype if out is None else out.dtype
    if scale_result is not None or out_dtype is not torch.bfloat16:
        return None
    return by_kernel(engine, a, b, scale_a, scale_b, bias, fast=use_fast_accum, into=out)


def _scaled_v2(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    scaling = recipe(scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
    if scaling not in (TENSORS, ROWS) or contraction_dim:
        return None
    if scales_rows(a, b, scale_a[0], scale_b[0]) is not (scaling == ROWS):
        return None
    rest = (bias, None, out_dtype, use_fast_accum)
    return _scaled(engine, a, b, scale_a[0], scale_b[0], *rest, out=out)


_overrides = Overrides(
    {
        "_scaled_mm": _scaled,
        "_scaled_mm.out": _scaled,
        "_scaled_mm_v2": _scaled_v2,
        "_scaled_mm_v2.out": _scaled_v2,
    },
    takes,
)
