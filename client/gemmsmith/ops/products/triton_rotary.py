"""The rotation of rotary.py as a Triton kernel, which rotates Q and K in one launch.

A program takes a tile of heads' rows. Dimensions over which the factors are expanded come last, so
that rows of a tile read the same factors.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.launching import TritonKernel, power_of_2, quotient_up
from gemmsmith.ops.products.rotary import Pair, Rotation, Strides

TILE = 1024
"""Pairs of a program: 16 elements for each of its threads. Not measured on a GPU so far."""
UNIT = 16
"""Elements of which all strides are multiples if a thread may read 16 bytes at a time."""
MOST = 2**30
"""Bound of rows and strides, which the kernel counts in 32 bits."""
LEADING = 3
"""Dimensions before the last."""

_NUMBERS = (
    *("q_count", "q_middle", "q_inner", "q_0", "q_1", "q_2", "of_q_0", "of_q_1", "of_q_2"),
    *("k_count", "k_middle", "k_inner", "k_0", "k_1", "k_2", "of_k_0", "of_k_1", "of_k_2"),
    *("factor_0", "factor_1", "factor_2"),
)


@TritonKernel
@triton.jit(do_not_specialize=_NUMBERS)
def _rotate(
    q, k, of_q, of_k, cos, sin,
    q_count, q_middle, q_inner, q_0, q_1, q_2, of_q_0, of_q_1, of_q_2,
    k_count, k_middle, k_inner, k_0, k_1, k_2, of_k_0, of_k_1, of_k_2,
    factor_0, factor_1, factor_2,
    half: tl.constexpr, reads_pairs: tl.constexpr, writes_pairs: tl.constexpr,
    shares: tl.constexpr, has_pairs: tl.constexpr, sign: tl.constexpr,
    is_transposed: tl.constexpr, rest: tl.constexpr, unit: tl.constexpr,
    block: tl.constexpr, rest_block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = (q_count + rows - 1) // rows
    x, out, count, middle, inner = q, of_q, q_count, q_middle, q_inner
    x_0, x_1, x_2, out_0, out_1, out_2 = q_0, q_1, q_2, of_q_0, of_q_1, of_q_2
    if program >= programs:
        program -= programs
        x, out, count, middle, inner = k, of_k, k_count, k_middle, k_inner
        x_0, x_1, x_2, out_0, out_1, out_2 = k_0, k_1, k_2, of_k_0, of_k_1, of_k_2
    row = program * rows + tl.arange(0, rows)[:, None]
    is_row = row < count
    at_2 = (row % inner).to(tl.int64)
    at_1 = (row // inner % middle).to(tl.int64)
    at_0 = (row // inner // middle).to(tl.int64)
    x += (at_0 * x_0 + at_1 * x_1 + at_2 * x_2) * unit
    out += (at_0 * out_0 + at_1 * out_1 + at_2 * out_2) * unit
    factor = (at_0 * factor_0 + at_1 * factor_1 + at_2 * factor_2) * unit
    cos += factor
    sin += factor

    column = tl.arange(0, block)[None, :]
    both = tl.arange(0, 2 * block)[None, :]
    is_there = is_row & (column < half)
    are_there = is_row & (both < 2 * half)
    if reads_pairs:
        pairs = tl.load(x + both, mask=are_there, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (rows, block, 2)))
    else:
        a = tl.load(x + column, mask=is_there, other=0.0).to(tl.float32)
        b = tl.load(x + half + column, mask=is_there, other=0.0).to(tl.float32)
    if shares:
        cos_1 = tl.load(cos + column, mask=is_there, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin + column, mask=is_there, other=0.0).to(tl.float32)
        cos_2, sin_2 = cos_1, sin_1
    elif has_pairs:
        pairs = tl.load(cos + both, mask=are_there, other=0.0).to(tl.float32)
        cos_1, cos_2 = tl.split(tl.reshape(pairs, (rows, block, 2)))
        pairs = tl.load(sin + both, mask=are_there, other=0.0).to(tl.float32)
        sin_1, sin_2 = tl.split(tl.reshape(pairs, (rows, block, 2)))
    else:
        cos_1 = tl.load(cos + column, mask=is_there, other=0.0).to(tl.float32)
        sin_1 = tl.load(sin + column, mask=is_there, other=0.0).to(tl.float32)
        cos_2 = tl.load(cos + half + column, mask=is_there, other=0.0).to(tl.float32)
        sin_2 = tl.load(sin + half + column, mask=is_there, other=0.0).to(tl.float32)
    if is_transposed:
        sin_1, sin_2 = sin_2, sin_1
    first = a * cos_1 - b * (sin_1 * sign)
    second = b * cos_2 + a * (sin_2 * sign)
    if writes_pairs:
        pairs = tl.reshape(tl.join(first, second), (rows, 2 * block))
        tl.store(out + both, pairs.to(out.dtype.element_ty), mask=are_there)
    else:
        tl.store(out + column, first.to(out.dtype.element_ty), mask=is_there)
        tl.store(out + half + column, second.to(out.dtype.element_ty), mask=is_there)
    if rest:
        more = 2 * half + tl.arange(0, rest_block)[None, :]
        are_there = is_row & (more < 2 * half + rest)
        value = tl.load(x + more, mask=are_there, other=0.0)
        tl.store(out + more, value.to(out.dtype.element_ty), mask=are_there)


class _HeadView(NamedTuple):
    """The shape of a tensor, the strides with which it is read, and those of its result."""

    shape: torch.Size
    read: Strides
    written: Strides


_NOTHING = _HeadView(torch.Size((0, 1, 1, 1)), (0, 0, 0, 1), (0, 0, 0, 1))


@lru_cache(maxsize=4096)
def _launch(
    rotation: Rotation, shape: torch.Size, strides: Strides, q: _HeadView, k: _HeadView
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Programs, numbers and constants. `shape` and `strides` are those of the factors."""
    factors = _leading(shape, strides)
    order = sorted(range(LEADING), key=lambda at: factors[at] == 0)
    sizes = [[1] * (LEADING + 1 - len(view.shape)) + [*view.shape] for view in (q, k)]
    steps = [_leading(view.shape, along) for view in (q, k) for along in (view.read, view.written)]
    unit = 1 if any(step % UNIT for own in (*steps, factors) for step in own) else UNIT
    rest = max(q.shape[-1], k.shape[-1]) - 2 * rotation.half
    block = power_of_2(rotation.half)
    rows = max(1, TILE // block)
    programs, numbers = 0, list[int]()
    for own, along in zip(sizes, (steps[:2], steps[2:]), strict=True):
        count = own[0] * own[1] * own[2]
        programs += quotient_up(count, rows)
        numbers += [count, own[order[1]], own[order[2]]]
        numbers += [step[at] // unit for step in along for at in order]
    numbers += [factors[at] // unit for at in order]
    if max(numbers) >= MOST:
        raise LaunchFailed("too many rows")
    constants = (*rotation, rest, unit, block, power_of_2(max(rest, 1)), rows)
    return programs, tuple(numbers), constants


def _leading(shape: torch.Size, strides: Strides) -> list[int]:
    """The strides before the last, of three dimensions; 0 where an index is always 0."""
    steps = [0 if size == 1 else step for size, step in zip(shape, strides, strict=True)]
    return [0] * (LEADING + 1 - len(shape)) + steps[:-1]


def rotate(
    cos: torch.Tensor,
    sin: torch.Tensor,
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    rotation: Rotation,
    dtype: torch.dtype,
    order: tuple[Strides | None, Strides | None],
) -> Pair:
    """As rotary.rotate."""
    read, views, written = list[torch.Tensor](), list[_HeadView](), list[torch.Tensor | None]()
    for x, strides in zip((q, k), order, strict=True):
        if x is None or strides is None:
            views.append(_NOTHING)
            written.append(None)
            continue
        read.append(x if x.stride(-1) == 1 else x.contiguous())
        views.append(_HeadView(x.shape, read[-1].stride(), strides))
        written.append(torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device))
    programs, numbers, constants = _launch(rotation, cos.shape, cos.stride(), *views)
    # A kernel needs a tensor for every argument: what is left out has no rows.
    outputs = [x for x in written if x is not None]
    tensors = (read[0], read[-1], outputs[0], outputs[-1], cos, sin)
    _rotate(programs, tensors, *constants, numbers=numbers)
    return written[0], written[1]
