"""mixture.route as two Triton kernels: a counting sort, stable and the same at every run.

Slots are cut into blocks. The first kernel counts each block's slots of each expert; the second
adds up the counts, which gives where a block's slots of an expert go, and puts them there. A tile
holds some slots times all experts, so that ranks are sums along a column.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel, power_of_2, quotient_up

TILE = 8192
"""Elements of a tile: 32 registers a thread of eight warps."""
BLOCK = 64
"""Slots of a block, at least."""
BLOCKS = 256
"""At most: each adds up the counts of all."""


@TritonKernel
@triton.jit(do_not_specialize=["count"])
def _count(
    index, counts, count,
    number: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, columns)[None, :]
    total = tl.zeros((rows, columns), dtype=tl.int32)
    for first in range(0, block, rows):
        slot = program * block + first + tl.arange(0, rows)
        there = slot < count
        expert = tl.where(there, tl.load(index + slot, mask=there, other=0).to(tl.int32), number)
        total += ((expert[:, None] == column) & (column < number)).to(tl.int32)
    at = counts + program * columns + tl.arange(0, columns)
    tl.store(at, tl.sum(total, axis=0))


@TritonKernel
@triton.jit(do_not_specialize=["count", "blocks"])
def _place(
    index, counts, slots, places, ends, count, blocks,
    number: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    one = tl.arange(0, columns)
    column = one[None, :]
    whole = tl.zeros((rows, columns), dtype=tl.int32)
    before = tl.zeros((rows, columns), dtype=tl.int32)
    for first in range(0, blocks, rows):
        other = first + tl.arange(0, rows)[:, None]
        counted = tl.load(counts + other * columns + column, mask=other < blocks, other=0)
        whole += counted
        before += tl.where(other < program, counted, 0)
    totals, earlier = tl.sum(whole, axis=0), tl.sum(before, axis=0)
    last = tl.cumsum(totals, axis=0)
    if program == 0:
        tl.store(ends + one, last, mask=one < number)
    used = tl.sum(totals, axis=0)
    place = last - totals + earlier  # of the next slot of each expert
    ours = tl.sum(earlier, axis=0)  # slots until here that are some expert's
    for first in range(0, block, rows):
        slot = program * block + first + tl.arange(0, rows)
        there = slot < count
        expert = tl.where(there, tl.load(index + slot, mask=there, other=0).to(tl.int32), number)
        chosen = ((expert[:, None] == column) & (column < number)).to(tl.int32)
        rank = tl.cumsum(chosen, axis=0) - 1
        found = tl.sum(chosen * (rank + place[None, :]), axis=1)
        is_ours = tl.sum(chosen, axis=1)
        # All others come behind, as they come.
        behind = used + slot - (ours + tl.cumsum(is_ours, axis=0))
        found = tl.where(is_ours > 0, found, behind)
        tl.store(slots + found, slot.to(tl.int64), mask=there)
        tl.store(places + slot, found.to(tl.int64), mask=there)
        place += tl.sum(chosen, axis=0)
        ours += tl.sum(is_ours, axis=0)


def route(
    top_k_index: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As mixture.route: slots, places and ends; of at least one slot and one expert."""
    index, count = top_k_index.contiguous(), top_k_index.numel()
    block = max(BLOCK, power_of_2(quotient_up(count, BLOCKS)))
    blocks = quotient_up(count, block)
    columns = max(16, power_of_2(number))
    sizes = (number, columns, min(block, TILE // columns), block)
    slots = torch.empty(count, dtype=torch.int64, device=index.device)
    places = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    ends = torch.empty(number, dtype=torch.int32, device=index.device)
    counts = torch.empty(blocks, columns, dtype=torch.int32, device=index.device)
    _count(blocks, (index, counts), *sizes, numbers=(count,), warps=8)
    _place(blocks, (index, counts, slots, places, ends), *sizes, numbers=(count, blocks), warps=8)
    return slots, places, ends
