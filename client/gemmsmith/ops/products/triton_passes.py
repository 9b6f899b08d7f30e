"""The passes of passes.py as Triton kernels: a program for each row or token, columns in blocks. A
model's widths do not change, so kernels are compiled for them.

Only imported where there is a GPU: torch's builds for CUDA bring Triton.
"""

from __future__ import annotations

from math import isfinite

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, no-untyped-call"
import torch
import triton
import triton.language as tl

from gemmsmith.ops.engine.launching import TritonKernel
from gemmsmith.ops.products.passes import SWIGLU, ActivateGradients, Opening

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


@triton.jit
def _load(row, first, inner: tl.constexpr, interleaved: tl.constexpr, block: tl.constexpr):
    """Some columns of gate and up in a row of both, in FP32; zeros beyond the last."""
    if interleaved:
        at = 2 * first + tl.arange(0, 2 * block)
        both = tl.load(row + at, mask=at < 2 * inner, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (block, 2)))
    else:
        at = first + tl.arange(0, block)
        gate = tl.load(row + at, mask=at < inner, other=0.0).to(tl.float32)
        up = tl.load(row + inner + at, mask=at < inner, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _opened(
    row, of_bias, first,
    biased: tl.constexpr, inner: tl.constexpr, interleaved: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The same with the bias of the row's expert."""
    gate, up = _load(row, first, inner, interleaved, block)
    if biased:
        more_gate, more_up = _load(of_bias, first, inner, interleaved, block)
        gate += more_gate
        up += more_up
    return gate, up


@triton.jit
def _adjusted(gate, up, limited: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr):
    """Both clamped, and the offset added to up."""
    if limited:  # what is no number stays
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if offset != 0:
        up += offset
    return gate, up


@triton.jit
def _store(
    row, first, gate, up, inner: tl.constexpr, interleaved: tl.constexpr, block: tl.constexpr
):
    """Write what `_load` reads."""
    kind = row.dtype.element_ty
    if interleaved:
        at = 2 * first + tl.arange(0, 2 * block)
        both = tl.reshape(tl.join(gate, up), (2 * block,))
        tl.store(row + at, both.to(kind), mask=at < 2 * inner)
    else:
        at = first + tl.arange(0, block)
        tl.store(row + at, gate.to(kind), mask=at < inner)
        tl.store(row + inner + at, up.to(kind), mask=at < inner)


@TritonKernel
@triton.jit
def _activate(
    gate_up, shares, slots, used, bias, numbers, out,
    biased: tl.constexpr, alpha: tl.constexpr, limited: tl.constexpr, limit: tl.constexpr,
    offset: tl.constexpr, interleaved: tl.constexpr, inner: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(used):
        slot = tl.load(slots + row)
        share = tl.load(shares + slot).to(tl.float32)
        of_row, of_bias = gate_up + row * 2 * inner, bias
        if biased:
            of_bias += tl.load(numbers + slot).to(tl.int64) * 2 * inner
        for first in range(0, inner, block):
            gate, up = _opened(of_row, of_bias, first, biased, inner, interleaved, block)
            gate, up = _adjusted(gate, up, limited, limit, offset)
            at = first + tl.arange(0, block)
            value = gate * tl.sigmoid(alpha * gate) * up * share
            tl.store(out + row * inner + at, value.to(out.dtype.element_ty), mask=at < inner)


@TritonKernel
@triton.jit
def _activate_backward(
    gate_up, shares, slots, used, bias, numbers, gradient, d_gate_up, d_shares, again,
    needs_gate_up: tl.constexpr, needs_shares: tl.constexpr, needs_again: tl.constexpr,
    biased: tl.constexpr, alpha: tl.constexpr, limited: tl.constexpr, limit: tl.constexpr,
    offset: tl.constexpr, interleaved: tl.constexpr, inner: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    of_share = 0.0
    if row < tl.load(used):
        share = tl.load(shares + slot).to(tl.float32)
        of_row = row * 2 * inner
        of_bias = bias
        if biased:
            of_bias += tl.load(numbers + slot).to(tl.int64) * 2 * inner
        for first in range(0, inner, block):
            at = first + tl.arange(0, block)
            there = at < inner
            own_gate, own_up = _opened(
                gate_up + of_row, of_bias, first, biased, inner, interleaved, block
            )
            gate, up = _adjusted(own_gate, own_up, limited, limit, offset)
            dy = tl.load(gradient + row * inner + at, mask=there, other=0.0).to(tl.float32)
            opened = tl.sigmoid(alpha * gate)
            hidden = gate * opened * up
            if needs_shares:
                of_share += tl.sum(hidden * dy, axis=0)
            if needs_gate_up:
                dy *= share
                d_gate = dy * up * opened * (1 + alpha * gate * (1 - opened))
                d_up = dy * gate * opened
                if limited:
                    d_gate = tl.where(own_gate > limit, 0.0, d_gate)
                    d_up = tl.where(tl.abs(own_up) > limit, 0.0, d_up)
                _store(d_gate_up + of_row, first, d_gate, d_up, inner, interleaved, block)
            if needs_again:
                kind = gate_up.dtype.element_ty
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
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    opening: Opening = SWIGLU,
) -> torch.Tensor:
    """As passes.activate; rows from `used` on are left as they are."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    gate_up, slots = gate_up.contiguous(), slots.contiguous()
    read = (gate_up, shares.contiguous(), slots, used, *_biases(opening, gate_up, slots))
    _activate(rows, (*read, out), *_constants(opening), inner, BLOCK)
    return out


def activate_backward(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
    needs: tuple[bool, bool, bool],
    opening: Opening = SWIGLU,
) -> ActivateGradients:
    """As passes.activate_backward; rows from `used` on are left as they are."""
    rows, inner = gradient.shape
    gate_up, shares, slots = gate_up.contiguous(), shares.contiguous(), slots.contiguous()
    gradients = ActivateGradients(
        gate_up=torch.empty_like(gate_up) if needs[0] else None,
        shares=torch.empty_like(shares) if needs[1] else None,
        again=gate_up.new_empty(rows, inner) if needs[2] else None,
    )
    biases = _biases(opening, gate_up, slots)
    read = (gate_up, shares, slots, used, *biases, gradient.contiguous())
    # The kernel needs a tensor for every argument; it does not write to gate_up.
    written = [gate_up if tensor is None else tensor for tensor in gradients]
    _activate_backward(rows, (*read, *written), *needs, *_constants(opening), inner, BLOCK)
    return gradients


def _biases(
    opening: Opening, gate_up: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias and the expert of each slot. Without a bias: tensors that are not read."""
    if opening.bias is None or opening.numbers is None:
        return gate_up, slots
    return opening.bias.contiguous(), opening.numbers.contiguous()


def _constants(opening: Opening) -> tuple[float, ...]:
    """From `biased` to `interleaved`."""
    alpha, limit, offset, interleaved = opening.gate
    limited = isfinite(limit)
    return opening.bias is not None, alpha, limited, limit if limited else 0.0, offset, interleaved
