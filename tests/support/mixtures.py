"""A reference for layers of experts, computed expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional

BOUND = 1.5e-2
"""Relative error in the Frobenius norm of a few consecutive roundings to bf16."""


def swiglu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def clamped(both: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
    """As gpt-oss, whose limit is 7."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def reference(
    x: torch.Tensor,
    index: torch.Tensor,
    *weights: torch.Tensor,
    gate: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """The output [T, width], from tokens, experts' indices [T, chosen], shares and weights.

    gate_up's bias may come after the weights.
    """
    shares, gate_up, down, *biases = weights
    total = torch.zeros_like(x)
    for expert in range(len(down)):
        token, place = (index == expert).nonzero(as_tuple=True)
        both = x[token] @ gate_up[expert].T
        for bias in biases:
            both = both + bias[expert]
        out = gate(both) @ down[expert].T * shares[token, place, None]
        total = total.index_add(0, token, out)
    return total


def close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that the difference from the exact result is explained by rounding."""
    difference = torch.linalg.vector_norm(actual.detach().double() - exact)
    assert difference <= BOUND * torch.linalg.vector_norm(exact)


def compared(
    compute: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], index: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The result and the gradients of trained operands, with the same in FP64."""
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in operands]
    exact = reference(wide[0], index, *wide[1:])
    actual = compute(operands[0], index, *operands[1:])
    # Of one token the terms of a random gradient may cancel.
    gradient = torch.randn_like(actual).bfloat16() if len(actual) > 1 else actual.detach()
    yield actual, exact.detach()
    leaves = [[leaf for leaf in some if leaf.requires_grad] for some in (operands, wide)]
    ours = torch.autograd.grad(actual, leaves[0], gradient.to(actual.dtype))
    theirs = torch.autograd.grad(exact, leaves[1], gradient.double())
    yield from zip(ours, theirs, strict=True)
