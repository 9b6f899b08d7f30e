"""routing.route as three Triton kernels: a counting sort, stable and the same at every run.

Slots are cut into blocks. The first kernel counts each block's slots of each expert. The second
adds up the counts, which gives the first row of a block's slots of an expert. The third puts the
slots there: within a block, each after the earlier slots of the same expert. The experts of other
ranks count as one more expert, the last.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.launching import TritonKernel, power_of_2, quotient_up
from gemmsmith.ops.products.routing import Routing

MOST_EXPERTS, MOST_SLOTS = 256, 2**18
"""Most that these kernels sort. torch's sort launches about ten, but scales better."""
BLOCK = 256
"""Slots of a block: as many threads."""
COMPARED = 32
"""Slots of a block with which each slot is compared at a time: registers of a thread."""
ADDED = 4096
"""Counts that are added up at a time."""


@triton.jit
def _expert(index, slot, count, number: tl.constexpr):
    """The expert of each slot; `number` for experts of other ranks."""
    expert = tl.load(index + slot, mask=slot < count, other=0).to(tl.int64)
    return tl.where((expert >= 0) & (expert < number), expert, number).to(tl.int32)


@TritonKernel
@triton.jit(do_not_specialize=["count", "blocks"])
def _count(
    index, counts, count, blocks, number: tl.constexpr, columns: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0)
    slot = program * block + tl.arange(0, block)
    # What lies beyond the last slot is counted in a column that is not read.
    expert = tl.where(slot < count, _expert(index, slot, count, number), number + 1)
    column = tl.arange(0, columns)
    numbers = tl.histogram(expert, columns)
    tl.store(counts + column * blocks + program, numbers, mask=column <= number)


@TritonKernel
@triton.jit(do_not_specialize=["blocks"])
def _add(counts, begins, ends, blocks, number: tl.constexpr, added: tl.constexpr):
    expert = tl.program_id(0)
    before = expert * blocks
    total = tl.zeros((added,), dtype=tl.int32)
    for first in range(0, before, added):
        at = first + tl.arange(0, added)
        total += tl.load(counts + at, mask=at < before, other=0)
    begin = tl.sum(total, axis=0)
    for first in range(0, blocks, added):
        at = first + tl.arange(0, added)
        slots = tl.load(counts + before + at, mask=at < blocks, other=0)
        tl.store(begins + before + at, begin + tl.cumsum(slots, axis=0) - slots, mask=at < blocks)
        begin += tl.sum(slots, axis=0)
    if expert < number:
        tl.store(ends + expert, begin)


@TritonKernel
@triton.jit(do_not_specialize=["count", "blocks"])
def _place(
    index, begins, slots, places, count, blocks,
    number: tl.constexpr, block: tl.constexpr, compared: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    slot = program * block + tl.arange(0, block)
    there = slot < count
    expert = _expert(index, slot, count, number)
    rank = tl.zeros((block,), dtype=tl.int32)
    for first in range(0, block, compared):
        other = program * block + first + tl.arange(0, compared)
        its = _expert(index, other, count, number)
        comes_first = (its[None, :] == expert[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(comes_first.to(tl.int32), axis=1)
    place = tl.load(begins + expert * blocks + program, mask=there, other=0) + rank
    tl.store(slots + place, slot.to(tl.int64), mask=there)
    tl.store(places + slot, place.to(tl.int64), mask=there)


def route(top_k_index: torch.Tensor, number: int) -> Routing:
    """As routing.route.

    Raises:
        LaunchFailed: torch sorts these.
    """
    index, count = top_k_index.contiguous(), top_k_index.numel()
    if number > MOST_EXPERTS or not 0 < count <= MOST_SLOTS:
        raise LaunchFailed("torch sorts so many faster")
    blocks = quotient_up(count, BLOCK)
    slots = torch.empty(count, dtype=torch.int64, device=index.device)
    places = torch.empty(index.shape, dtype=torch.int64, device=index.device)
    ends = torch.empty(number, dtype=torch.int32, device=index.device)
    counts = torch.empty(2, number + 1, blocks, dtype=torch.int32, device=index.device)
    begins = counts[1]
    sizes, columns = (count, blocks), power_of_2(number + 2)
    _count(blocks, (index, counts), number, columns, BLOCK, numbers=sizes, warps=8)
    _add(number + 1, (counts, begins, ends), number, ADDED, numbers=(blocks,), warps=8)
    tensors = (index, begins, slots, places)
    _place(blocks, tensors, number, BLOCK, COMPARED, numbers=sizes, warps=8)
    return Routing(slots=slots, places=places, ends=ends)
