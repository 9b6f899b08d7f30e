"""torch's grouped products by tuned kernels: unchanged mixtures of experts, both passes.

`_grouped_mm` and `_scaled_grouped_mm` (also `_v2`, with a factor per row) take tokens sorted by
expert, and offsets, the end of each expert's tokens. An operand of two dimensions times one of
three is a layer's output or its input's gradient. Two dimensions times two are its weight's
gradient. These run kernels where they have winners. torch computes a left operand of three
dimensions, a bias, and everything else that no kernel takes. Where one order of sums is demanded,
two operands of three dimensions are a plain batch, and the others raise.

Offsets stay on the device, unread: nothing waits for them, and a CUDA graph may be replayed with
others. The decision depends on the numbers of tokens and experts, not on tokens per expert.
Compiled callers of `_grouped_mm` enter the binding, which decides and launches as for `mm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from gemmsmith.ops.below.blocks import Weights, of_experts
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.below.overriding import Overrides
from gemmsmith.ops.below.scaling import ROWS, recipe
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.forms import Form
from gemmsmith.ops.engine.in_use import in_use
from gemmsmith.ops.engine.operands import present


def by_kernel(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor | None,
    form: Form = Form.GROUPED,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The grouped product. Returns None if torch must compute it.

    Args:
        engine: decides.
        a: [T, K], or [M, T].
        b: [E, K, N], or [T, N].
        offsets: [E] int32 on the device: where each group ends in T.
        form: which product.
        scale_a: FP32 factors: [T], or [E · M].
        scale_b: [E, N], or [E · N].
    """
    if (
        offsets is None
        or offsets.dtype is not torch.int32
        or offsets.dim() != 1
        or offsets.device != a.device
        or not (offsets.is_contiguous() or engine.is_invariant)
    ):
        return None
    offsets = offsets.contiguous()
    operands = present(offsets=offsets, scale_a=scale_a, scale_b=scale_b)
    return engine.product(form, a, b, operands)


def takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's own grouped product of these is replaced at present."""
    engine = in_use()
    if engine is None or b.dim() not in (2, 3) or not (a.dim() == 2 or engine.is_invariant):
        return False
    return _overrides.blocks.hold(a, b)


@contextmanager
def on(kind: str, only: Weights | None) -> Iterator[None]:
    """See `Overrides.on`; `only` is sizes of one expert's weights."""
    dispatch = Dispatch.of(kind)
    with ExitStack() as stack:
        stack.enter_context(_overrides.on(kind, only, dispatch.enter if dispatch else None))
        if dispatch is not None:
            stack.enter_context(dispatch.on(frozenset(), groups=only))
        yield


def weights_of(model: torch.nn.Module) -> Weights:
    """Sizes that experts' weights may have: linear layers', and parts of a tensor of all."""
    return frozenset(
        (int(weight.shape[-2]), int(weight.shape[-1]))
        for weight in model.parameters()
        if weight.dim() in (2, 3)
    )


def _grouped(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    if bias is not None or out_dtype not in (None, a.dtype):
        return None
    if offs is None or a.dim() == 3:
        is_batch = engine.is_invariant and offs is None and a.dim() == b.dim() == 3
        return engine.product(Form.MATMUL, a, b) if is_batch else None
    return by_kernel(engine, a, b, offs)


def _scaled(
    engine: Engine,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor | None:
    if (
        offs is None
        or offs.dim() != 1
        or bias is not None
        or scale_result is not None
        or out_dtype not in (None, torch.bfloat16)
    ):
        return None
    groups, rows, columns = offs.shape[0], a.shape[0], b.shape[-1]
    sizes = (
        [(rows,), (groups, columns)] if b.dim() == 3 else [(groups * rows,), (groups * columns,)]
    )
    for scale, size in zip((scale_a, scale_b), sizes, strict=True):
        if (
            scale.dtype is not torch.float32
            or scale.shape != size
            or scale.device != a.device
            or not scale.is_contiguous()
        ):
            return None
    form = Form.GROUPED_SCALED if use_fast_accum else Form.GROUPED_SCALED_PRECISE
    return by_kernel(engine, a, b, offs, form, scale_a, scale_b)


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
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor | None:
    scales = (scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
    if recipe(*scales) != ROWS or contraction_dim:
        return None
    return _scaled(
        engine, a, b, scale_a[0], scale_b[0], offs, bias, None, out_dtype, use_fast_accum
    )


_overrides = Overrides(
    {
        "_grouped_mm": _grouped,
        "_scaled_grouped_mm": _scaled,
        "_scaled_grouped_mm_v2": _scaled_v2,
    },
    takes,
    of_experts,
)
