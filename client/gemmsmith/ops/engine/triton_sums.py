"""Sums of columns, as of a bias's gradient, in one pass over memory.

Rows are cut into parts: one Triton kernel adds up each part's columns, another the parts. Sums are
FP32, in an order that depends on the GPU and the sizes alone. A model's widths do not change, so
kernels are compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

from functools import lru_cache

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.launching import TritonKernel, power_of_2, quotient_up

TILE, WIDEST = 4096, 256
"""Elements that a thread block adds at a time, and their columns at most: 16 bytes for each thread
of a warp, of 16-bit elements."""
BLOCKS = 8
"""Thread blocks for each SM, which keep loads of 64 KiB in flight. No other number was measured."""
PARTS = 128
"""Parts of the rows, at most: one thread block adds up all of them for `COLUMNS` columns."""
MOST_ROWS = 2**30
"""Rows that the kernel counts, in 32 bits."""
COLUMNS, ROWS = 64, 64
"""Tile in which sums of parts are added up."""


@TritonKernel
@triton.jit(do_not_specialize=["count", "part"])
def _add_rows(
    x, sums, count, part,
    pitch: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (width + columns - 1) // columns
    at = tl.program_id(0) // tiles
    column = (tl.program_id(0) % tiles) * columns + tl.arange(0, columns)[None, :]
    begin = at * part
    end = tl.minimum(begin + part, count)
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for first in range(begin, end, rows):
        row = first + tl.arange(0, rows)[:, None]
        there = (row < end) & (column < width)
        value = tl.load(x + row.to(tl.int64) * pitch + column, mask=there, other=0.0)
        total += value.to(tl.float32)
    tl.store(sums + at * width + column, tl.sum(total, axis=0)[None, :], mask=column < width)


@TritonKernel
@triton.jit(do_not_specialize=["count"])
def _add_parts(
    sums, out, count,
    width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * columns + tl.arange(0, columns)[None, :]
    total = tl.zeros((rows, columns), dtype=tl.float32)
    for first in range(0, count, rows):
        row = first + tl.arange(0, rows)[:, None]
        there = (row < count) & (column < width)
        total += tl.load(sums + row * width + column, mask=there, other=0.0)
    value = tl.sum(total, axis=0)[None, :]
    tl.store(out + column, value.to(out.dtype.element_ty), mask=column < width)


def sums_of_columns(x: torch.Tensor) -> torch.Tensor:
    """The sum of all rows of x[M, N], whose columns have stride 1: [N], of its type.

    torch adds them up if no kernel can be launched.
    """
    try:
        return _column_sums(x.resolve_neg())
    except LaunchFailed:
        return x.sum(0)


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    count, width = x.shape
    if count > MOST_ROWS:
        raise LaunchFailed("too many rows")
    columns = min(WIDEST, max(16, power_of_2(width)))
    rows, tiles = TILE // columns, quotient_up(width, columns)
    parts = min(PARTS, max(1, BLOCKS * sm_count(x.get_device()) // tiles))
    part = quotient_up(quotient_up(count, parts), rows) * rows
    parts = quotient_up(count, part)
    sums = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    sizes = (x.stride(0), width, columns, rows)
    _add_rows(parts * tiles, (x, sums), *sizes, numbers=(count, part))
    out = x.new_empty(width)
    add_parts(sums, out)
    return out


def add_parts(sums: torch.Tensor, out: torch.Tensor) -> None:
    """`out[N]`, of any type, is the sum of all rows of the FP32 sums[P, N]."""
    parts, width = sums.shape
    _add_parts(quotient_up(width, COLUMNS), (sums, out), width, COLUMNS, ROWS, numbers=(parts,))


@lru_cache(maxsize=16)
def sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
