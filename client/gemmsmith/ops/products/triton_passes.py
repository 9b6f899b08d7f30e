"""The passes of passes.py as Triton kernels; one program a row, or some rows, columns in blocks. A
model's widths do not change, so kernels are compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel, quotient_up

BLOCK = 1024
"""Columns at a time: 16 bytes a thread of four warps, of 16-bit elements."""
ROWS, MANY = 8, 4096
"""That a program gathers at once, and from how many on. One at a time reached 1.8 TB/s on an H100,
with 131,072 rows of 2,048 columns: too few loads were on their way."""


@TritonKernel
@triton.jit(do_not_specialize=["count"])
def _gather(
    tokens, slots, out, shares, of_rows, count,
    pitch: tl.constexpr, width: tl.constexpr, chosen: tl.constexpr, shared: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < count
    slot = tl.load(slots + row, mask=there, other=0).to(tl.int64)
    if shared:
        tl.store(of_rows + row, tl.load(shares + slot).to(tl.float32), mask=there)
    source = tokens + (slot // chosen)[:, None] * pitch
    target = out + row[:, None] * width
    for first in range(0, width, block):
        at = first + tl.arange(0, block)[None, :]
        whole = there[:, None] & (at < width)
        tl.store(target + at, tl.load(source + at, mask=whole), mask=whole)


@TritonKernel
@triton.jit
def _gather_sum(
    rows, places, used, out, width: tl.constexpr, chosen: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(used)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        total = tl.zeros((block,), dtype=tl.float32)
        for j in tl.static_range(chosen):
            place = tl.load(places + token * chosen + j).to(tl.int64)
            there = (at < width) & (place < last)
            total += tl.load(rows + place * width + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@TritonKernel
@triton.jit
def _activate(gate_up, shares, slots, used, out, inner: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(used):
        share = tl.load(shares + tl.load(slots + row)).to(tl.float32)
        of_gate = gate_up + row * 2 * inner
        for first in range(0, inner, block):
            at = first + tl.arange(0, block)
            gate = tl.load(of_gate + at, mask=at < inner, other=0.0).to(tl.float32)
            up = tl.load(of_gate + inner + at, mask=at < inner, other=0.0).to(tl.float32)
            value = gate * tl.sigmoid(gate) * up * share
            tl.store(out + row * inner + at, value.to(out.dtype.element_ty), mask=at < inner)


@TritonKernel
@triton.jit
def _activate_backward(
    gate_up,
    shares,
    slots,
    used,
    gradient,
    d_gate_up,
    d_shares,
    again,
    inner: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    of_share = 0.0
    if row < tl.load(used):
        share = tl.load(shares + slot).to(tl.float32)
        of_row = row * 2 * inner
        for first in range(0, inner, block):
            at = first + tl.arange(0, block)
            there = at < inner
            gate = tl.load(gate_up + of_row + at, mask=there, other=0.0).to(tl.float32)
            up = tl.load(gate_up + of_row + inner + at, mask=there, other=0.0).to(tl.float32)
            wanted = tl.load(gradient + row * inner + at, mask=there, other=0.0).to(tl.float32)
            opened = tl.sigmoid(gate)
            hidden = gate * opened * up
            of_share += tl.sum(hidden * wanted, axis=0)
            wanted *= share
            of_gate = wanted * up * opened * (1 + gate * (1 - opened))
            kind = d_gate_up.dtype.element_ty
            tl.store(d_gate_up + of_row + at, of_gate.to(kind), mask=there)
            tl.store(d_gate_up + of_row + inner + at, (wanted * gate * opened).to(kind), mask=there)
            tl.store(again + row * inner + at, (hidden * share).to(kind), mask=there)
    tl.store(d_shares + slot, of_share.to(d_shares.dtype.element_ty))


def gather(tokens: torch.Tensor, slots: torch.Tensor, chosen: int) -> torch.Tensor:
    """As passes.gather."""
    tokens, out = _rows(tokens, slots)
    # What is not read or written stands for the shares.
    _gathered(tokens, slots, out, tokens, out, chosen, shared=False)
    return out


def gather_with_shares(
    tokens: torch.Tensor, shares: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As passes.gather_with_shares."""
    tokens, out = _rows(tokens, slots)
    of_rows = torch.empty(len(slots), dtype=torch.float32, device=tokens.device)
    _gathered(tokens, slots, out, shares.contiguous(), of_rows, shares.shape[1], shared=True)
    return out, of_rows


def _gathered(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    shares: torch.Tensor,
    of_rows: torch.Tensor,
    chosen: int,
    *,
    shared: bool,
) -> None:
    count = len(slots)
    rows = ROWS if count >= MANY else 1
    constants = (tokens.stride(0), out.shape[1], chosen, shared, rows, BLOCK)
    tensors = (tokens, slots, out, shares, of_rows)
    _gather(quotient_up(count, rows), tensors, *constants, numbers=(count,))


def _rows(tokens: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose rows are contiguous, and room for the token of each slot."""
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    return tokens, tokens.new_empty(len(slots), tokens.shape[-1])


def gather_sum(rows: torch.Tensor, places: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """As passes.gather_sum."""
    tokens, chosen = places.shape
    width = rows.shape[-1]
    out = rows.new_empty(tokens, width)
    _gather_sum(tokens, (rows.contiguous(), places, used, out), width, chosen, BLOCK)
    return out


def activate(
    gate_up: torch.Tensor, shares: torch.Tensor, slots: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """As passes.activate; rows from `used` on are left as they are."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    given = (gate_up.contiguous(), shares.contiguous(), slots, used)
    _activate(rows, (*given, out), inner, BLOCK)
    return out


def activate_backward(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As passes.activate_backward; rows from `used` on are left as they are."""
    rows, inner = gradient.shape
    gate_up, shares = gate_up.contiguous(), shares.contiguous()
    of_gate_up, of_shares = torch.empty_like(gate_up), torch.empty_like(shares)
    again = gate_up.new_empty(rows, inner)
    made = (of_gate_up, of_shares, again)
    given = (gate_up, shares, slots, used, gradient.contiguous())
    _activate_backward(rows, (*given, *made), inner, BLOCK)
    return made
