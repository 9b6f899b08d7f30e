"""A persistent product by Triton with one tile for all sizes, as batch-invariant libraries use.

Its rows have the same bits at every M, because no choice depends on M: the tile is fixed, and a
program adds up a tile's terms along all of K.
"""

from __future__ import annotations

from typing import Any

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K = 128, 128, 64
GROUP = 8
"""Rows of tiles that are computed together, so that L2 holds their operands."""
WARPS, STAGES = 8, 3


def matmul(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Write the bf16 product of a [M, K] and b [K, N] to d [M, N], of any strides."""
    (m, k), n = a.shape, b.shape[1]
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    tiles = triton.cdiv(m, TILE_M) * triton.cdiv(n, TILE_N)
    kernel: Any = _product
    kernel[(min(programs, tiles),)](
        *(a, b, d, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1)),
        *(d.stride(0), d.stride(1), programs, TILE_M, TILE_N, TILE_K, GROUP),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return d


@triton.jit
def _product(
    a, b, d, m, n, k, a_row, a_column, b_row, b_column, d_row, d_column, programs: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(n, tile_n)
    down = tl.cdiv(m, tile_m)
    for tile in tl.range(tl.program_id(0), across * down, programs):
        first = tile // (group * across) * group
        height = tl.minimum(down - first, group)
        within = tile % (group * across)
        rows = (first + within % height) * tile_m + tl.arange(0, tile_m)
        columns = (within // height) * tile_n + tl.arange(0, tile_n)
        row_starts = (rows % m).to(tl.int64) * a_row
        column_starts = (columns % n).to(tl.int64) * b_column
        total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
        for step in range(tl.cdiv(k, tile_k)):
            depth = step * tile_k + tl.arange(0, tile_k)
            there = depth < k
            of_a = a + row_starts[:, None] + depth[None, :] * a_column
            of_b = b + depth[:, None] * b_row + column_starts[None, :]
            left = tl.load(of_a, mask=there[None, :], other=0.0)
            right = tl.load(of_b, mask=there[:, None], other=0.0)
            total = tl.dot(left, right, total)
        out = d + rows.to(tl.int64)[:, None] * d_row + columns[None, :] * d_column
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        tl.store(out, total.to(d.dtype.element_ty), mask=inside)
