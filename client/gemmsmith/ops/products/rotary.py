"""Rotary position embeddings of Q and K by one kernel, forwards and backwards.

Pairs of a head's elements are rotated by the angles whose cosines and sines are given. Written out,
that is six to ten operators over Q and K. Our Triton kernel reads and writes each element once,
computes in FP32, and rounds once, to the result. The backward pass is the transposed rotation, by
the same kernel; it needs neither Q nor K.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gemmsmith.ops.engine.by_triton import by_triton
from gemmsmith.ops.products.registry import wants_gradient

Strides = tuple[int, ...]
CONTIGUOUS = (4, 3, 2, 1)
"""Strides in the order of a contiguous tensor's."""
Pair = tuple[torch.Tensor | None, torch.Tensor | None]


class Rotation(NamedTuple):
    """Which elements of a head make a pair, and which factors a pair has.

    The pair (a, b) becomes (a cos1 - b sin1, b cos2 + a sin2), with sines multiplied by `sign`.

    Attributes:
        half: number of pairs. A head's further elements are copied.
        reads_pairs: whether element 2i + 1 belongs to 2i, and not i + half to i.
        writes_pairs: as `reads_pairs`, of the result.
        shares: whether both elements of a pair have the same factors, which are then at i.
        has_pairs: whether factors lie as pairs do, at 2i and 2i + 1, and not at i and i + half.
        sign: 1 or -1.
        is_transposed: whether sin1 and sin2 change places.
    """

    half: int
    reads_pairs: bool
    writes_pairs: bool
    shares: bool
    has_pairs: bool
    sign: int
    is_transposed: bool = False

    @property
    def transposed(self) -> Rotation:
        return self._replace(
            reads_pairs=self.writes_pairs,
            writes_pairs=self.reads_pairs,
            sign=-self.sign,
            is_transposed=not self.is_transposed,
        )


@lru_cache(maxsize=4096)
def dense_strides(shape: torch.Size, strides: Strides) -> Strides:
    """Strides without gaps, in the same order: those of torch's pointwise results."""
    dense, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda at: (strides[at], -at)):
        dense[at], step = step, step * shape[at]
    return tuple(dense)


def rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    dtype: torch.dtype,
    order: tuple[Strides | None, Strides | None],
) -> Pair:
    """Q and K, rotated.

    Args:
        q: [..., D], of at most four dimensions.
        k: the same, but for the number of heads; None leaves it out.
        cos: [..., W], which can be expanded to the other dimensions of q and k.
        sin: as cos, with its strides. The last is 1, as those of q and k.
        rotation: of the last dimension.
        dtype: of the results.
        order: strides of the results.
    """
    if not wants_gradient(q, k):
        return rotate(cos, sin, q, k, rotation, dtype, order)
    result: Pair = Rotary.apply(q, k, cos, sin, rotation, dtype, order)  # type: ignore[no-untyped-call]
    return result


class Rotary(torch.autograd.Function):
    """See `rotary`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *how: Any,
    ) -> Pair:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.rotation = how[0].transposed
        ctx.dtype = q.dtype
        ctx.order = tuple(x if x is None else dense_strides(x.shape, x.stride()) for x in (q, k))
        results: Pair = rotate(cos, sin, q, k, *how)
        needs = ctx.needs_input_grad
        constant = [x for x, need in zip(results, needs[:2], strict=True) if not need]
        ctx.mark_non_differentiable(*(x for x in constant if x is not None))
        return results

    @staticmethod
    def backward(
        ctx: Any, of_q: torch.Tensor | None, of_k: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        of_q, of_k = of_q if needs_q else None, of_k if needs_k else None
        if of_q is None and of_k is None:
            return (None,) * 7
        gradients = rotate(cos, sin, of_q, of_k, ctx.rotation, ctx.dtype, ctx.order)
        return *gradients, None, None, None, None, None


@by_triton("gemmsmith.ops.products.triton_rotary")
def rotate(
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    rotation: Rotation,
    dtype: torch.dtype,
    order: tuple[Strides | None, Strides | None],
) -> Pair:
    """As `rotary`; the kernel's results have no gradient."""
    first, second = (
        None if x is None or strides is None else _rotated(x, cos, sin, rotation, dtype, strides)
        for x, strides in zip((q, k), order, strict=True)
    )
    return first, second


def _rotated(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    dtype: torch.dtype,
    strides: Strides,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    turned = 2 * rotation.half
    width = rotation.half if rotation.shares else turned
    a, b = _split(x[..., :turned].to(wide), are_pairs=rotation.reads_pairs)
    cosines, sines = (
        (factor, factor) if rotation.shares else _split(factor, are_pairs=rotation.has_pairs)
        for factor in (cos.to(wide)[..., :width], sin.to(wide)[..., :width] * rotation.sign)
    )
    if rotation.is_transposed:
        sines = sines[::-1]
    parts = [a * cosines[0] - b * sines[0], b * cosines[1] + a * sines[1]]
    if rotation.writes_pairs:
        parts = [torch.stack(parts, dim=-1).flatten(-2)]
    whole = torch.cat([*parts, x[..., turned:].to(wide)], dim=-1)
    return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(whole)


def _split(x: torch.Tensor, *, are_pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if are_pairs:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
