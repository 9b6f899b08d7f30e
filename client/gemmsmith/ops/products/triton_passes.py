"""The passes of passes.py as Triton kernels: a program for each row or token, columns in blocks. A
model's widths do not change, so kernels are compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel
from gemmsmith.ops.products.passes import ActivateGradients

BLOCK = 1024
"""Columns at a time: 16 bytes a thread of four warps, of 16-bit elements."""


@TritonKernel
@triton.jit
def _scatter(
    tokens, places, out, shares, of_rows,
    pitch: tl.constexpr, width: tl.constexpr, chosen: tl.constexpr, shared: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    of_token = token * chosen
    if shared:
        for j in tl.static_range(chosen):
            share = tl.load(shares + of_token + j).to(tl.float32)
            tl.store(of_rows + tl.load(places + of_token + j), share)
    for first in range(0, width, block):
        at = first + tl.arange(0, block)
        value = tl.load(tokens + token * pitch + at, mask=at < width)
        for j in tl.static_range(chosen):
            place = tl.load(places + of_token + j).to(tl.int64)
            tl.store(out + place * width + at, value, mask=at < width)


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
    gate_up, shares, slots, used, gradient, d_gate_up, d_shares, again,
    needs_gate_up: tl.constexpr, needs_shares: tl.constexpr, needs_again: tl.constexpr,
    inner: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
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
            dy = tl.load(gradient + row * inner + at, mask=there, other=0.0).to(tl.float32)
            opened = tl.sigmoid(gate)
            hidden = gate * opened * up
            kind = gate_up.dtype.element_ty
            if needs_shares:
                of_share += tl.sum(hidden * dy, axis=0)
            if needs_gate_up:
                dy *= share
                of_gate = (dy * up * opened * (1 + gate * (1 - opened))).to(kind)
                tl.store(d_gate_up + of_row + at, of_gate, mask=there)
                of_up = (dy * gate * opened).to(kind)
                tl.store(d_gate_up + of_row + inner + at, of_up, mask=there)
            if needs_again:
                tl.store(again + row * inner + at, (hidden * share).to(kind), mask=there)
    if needs_shares:
        tl.store(d_shares + slot, of_share.to(d_shares.dtype.element_ty))


def scatter(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    # The kernel needs a tensor for every argument; it does not use those of the shares.
    return _scattered(tokens, places, tokens, places, shared=False)


def scatter_with_shares(
    tokens: torch.Tensor, shares: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    of_rows = torch.empty(places.numel(), dtype=torch.float32, device=tokens.device)
    return _scattered(tokens, places, shares.contiguous(), of_rows, shared=True), of_rows


def _scattered(
    tokens: torch.Tensor,
    places: torch.Tensor,
    shares: torch.Tensor,
    of_rows: torch.Tensor,
    *,
    shared: bool,
) -> torch.Tensor:
    count, width = tokens.shape
    tokens = tokens if tokens.stride(-1) == 1 else tokens.contiguous()
    out = tokens.new_empty(places.numel(), width)
    constants = (tokens.stride(0), width, places.shape[1], shared, BLOCK)
    _scatter(count, (tokens, places.contiguous(), out, shares, of_rows), *constants)
    return out


def gather_sum(rows: torch.Tensor, places: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """As passes.gather_sum."""
    tokens, chosen = places.shape
    width = rows.shape[-1]
    out = rows.new_empty(tokens, width)
    read = (rows.contiguous(), places.contiguous(), used)
    _gather_sum(tokens, (*read, out), width, chosen, BLOCK)
    return out


def activate(
    gate_up: torch.Tensor, shares: torch.Tensor, slots: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """As passes.activate; rows from `used` on are left as they are."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    read = (gate_up.contiguous(), shares.contiguous(), slots.contiguous(), used)
    _activate(rows, (*read, out), inner, BLOCK)
    return out


def activate_backward(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> ActivateGradients:
    """As passes.activate_backward; rows from `used` on are left as they are."""
    rows, inner = gradient.shape
    gate_up, shares = gate_up.contiguous(), shares.contiguous()
    gradients = ActivateGradients(
        gate_up=torch.empty_like(gate_up) if needs[0] else None,
        shares=torch.empty_like(shares) if needs[1] else None,
        again=gate_up.new_empty(rows, inner) if needs[2] else None,
    )
    read = (gate_up, shares, slots.contiguous(), used, gradient.contiguous())
    # The kernel needs a tensor for every argument; it does not write to gate_up.
    written = [gate_up if tensor is None else tensor for tensor in gradients]
    _activate_backward(rows, (*read, *written), *needs, inner, BLOCK)
    return gradients
