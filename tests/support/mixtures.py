"""What a layer of experts is, one expert after the other."""

from __future__ import annotations

import torch
from torch.nn import functional

BOUND = 1.5e-2
"""Relative error in the Frobenius norm: some roundings to bf16 behind one another."""


def reference(x: torch.Tensor, index: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """[T, width] of tokens, choices [T, chosen], their shares, gate_up and down."""
    shares, gate_up, down = weights
    found = torch.zeros_like(x)
    for expert in range(len(down)):
        token, place = (index == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        out = (functional.silu(gate) * up) @ down[expert].T * shares[token, place, None]
        found = found.index_add(0, token, out)
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within the roundings of `found` from the exact result."""
    difference = torch.linalg.vector_norm(found.detach().double() - wanted)
    assert difference <= BOUND * torch.linalg.vector_norm(wanted)
