"""Operands that are the same on every machine and GPU, and hashes of results."""

from __future__ import annotations

import hashlib

import torch

_CHUNK = 2**26
"""Elements drawn at once: 64-bit integers of 512 MiB."""


def drawn(rows: int, columns: int, seed: int, device: str) -> torch.Tensor:
    """Return an FP32-exact bf16 matrix [rows, columns] of zero mean and a deviation of 0.41.

    torch's generators depend on the GPU, so elements are hashes of their index, computed with
    integers: the sum of two uniform numbers of 16 bits.
    """
    out = torch.empty(rows * columns, dtype=torch.bfloat16, device=device)
    for begin in range(0, out.numel(), _CHUNK):
        part = out[begin : begin + _CHUNK]
        h = torch.arange(begin, begin + len(part), device=device).add_(seed * 0x9E3779B1)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            h.bitwise_and_(0xFFFFFFFF).bitwise_xor_(h >> shift).mul_(factor)
        h.bitwise_and_(0xFFFFFFFF).bitwise_xor_(h >> 16)
        part.copy_(((h & 0xFFFF) + (h >> 16) - 0xFFFF).float().mul_(2**-16))
    return out.view(rows, columns)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaNs compare, and -0 differs from 0."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.view(kinds[tensor.dtype.itemsize])


def hashed(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bits(tensor.contiguous()).cpu().numpy().tobytes()).hexdigest()[:16]
