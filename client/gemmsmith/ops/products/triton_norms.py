"""The backward pass of norms.py as Triton kernels. A model's widths do not change, so kernels are
compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel, power_of_2, quotient_up
from gemmsmith.ops.engine.triton_sums import add_parts, sm_count

TILE = 4096
"""Elements that a thread block holds at a time, in whole rows."""
BLOCKS = 4
"""Thread blocks for each SM, which share the rows."""


@TritonKernel
@triton.jit(do_not_specialize=["count"])
def _backward(
    gradient, x, weight, scale, of_x, sums, count,
    needs_x: tl.constexpr, needs_weight: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, block)[None, :]
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((rows, block), dtype=tl.float32)
    for first in range(program * rows, count, programs * rows):
        row = first + tl.arange(0, rows)[:, None]
        at = row.to(tl.int64) * width + column
        there = (row < count) & (column < width)
        scaled = tl.load(scale + row, mask=row < count, other=0.0)
        normal = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * scaled
        dy = tl.load(gradient + at, mask=there, other=0.0).to(tl.float32)
        if needs_weight:
            total += dy * normal
        if needs_x:
            dy *= factor
            mean = tl.sum(dy * normal, axis=1)[:, None] / width
            value = scaled * (dy - normal * mean)
            tl.store(of_x + at, value.to(of_x.dtype.element_ty), mask=there)
    if needs_weight:
        at = program * width + column
        tl.store(sums + at, tl.sum(total, axis=0)[None, :], mask=column < width)


def gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As norms.gradients."""
    gradient, x, weight, scale = (tensor.contiguous() for tensor in (gradient, x, weight, scale))
    width = weight.shape[0]
    count = x.numel() // width
    block = power_of_2(width)
    rows = max(1, TILE // block)
    # Of 8192 elements, 4 warps take 239 µs and 8 take 278; of 128, 132 and 111 (H200, 2026-11-25).
    warps = 8 if rows > 1 else 4
    programs = min(quotient_up(count, rows), BLOCKS * sm_count(x.get_device()))
    of_x = torch.empty_like(x) if needs[0] else None
    of_weight = torch.empty_like(weight) if needs[1] else None
    sums = torch.empty(programs if needs[1] else 0, width, dtype=torch.float32, device=x.device)
    read = (gradient, x, weight, scale)
    _backward(
        programs,
        # A kernel needs a tensor for every argument: x and sums are not written in that case.
        (*read, x if of_x is None else of_x, sums),
        *(*needs, width, block, rows),
        numbers=(count,),
        warps=warps,
    )
    if of_weight is not None:
        add_parts(sums, of_weight)
    return of_x, of_weight
