"""The operands of a layer of experts, and which of them `gemmsmith.experts` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gemmsmith.ops.products.grouped import BEGIN
from gemmsmith.ops.products.passes import Gate

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertsOperands(NamedTuple):
    """Those of `experts`, and what models of other activations have.

    Attributes:
        tokens: [T, width].
        numbers: [T, chosen], `top_k_index`.
        shares: [T, chosen].
        gate_up: [E, 2 * inner, width].
        down: [E, width, inner].
        bias: [E, 2 * inner], of gate_up.
        gate: how gate and up are multiplied.
        down_bias: [E, width].
    """

    tokens: torch.Tensor
    numbers: torch.Tensor
    shares: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    bias: torch.Tensor | None = None
    gate: Gate = Gate()
    down_bias: torch.Tensor | None = None


def refusal(
    tokens: torch.Tensor,
    index: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> str | None:
    """Why `experts` does not take these operands. Returns None if it does."""
    operands = (tokens, index, shares, gate_up, down)
    if tokens.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3 or index.dim() != 2:
        return (
            "experts takes hidden_states [T, width], top_k_index [T, chosen], gate_up "
            f"[E, 2 * inner, width] and down [E, width, inner], not {list(tokens.shape)}, "
            f"{list(index.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    width, inner, number = tokens.shape[1], down.shape[2], gate_up.shape[0]
    sizes = ((number, 2 * inner, width), (number, width, inner), index.shape)
    actual = (gate_up.shape, down.shape, shares.shape)
    for name, size, has in zip(("gate_up", "down", "top_k_weights"), sizes, actual, strict=True):
        if tuple(has) != tuple(size):
            return f"{name} must be {list(size)} here, not {list(has)}"
    if index.shape[0] != tokens.shape[0]:
        return f"top_k_index has {index.shape[0]} rows for {tokens.shape[0]} tokens"
    if not number:
        return "gate_up and down must hold at least one expert"
    if not gate_up.dtype == down.dtype == tokens.dtype:
        types = f"{tokens.dtype}, {gate_up.dtype} and {down.dtype}"
        return f"hidden_states, gate_up and down must have one type, not {types}"
    if tokens.dtype not in _TYPES:
        return f"hidden_states must be of 16 or 32 bit floats, not {tokens.dtype}"
    if not shares.is_floating_point():
        return f"top_k_weights must be floats, not {shares.dtype}"
    if index.is_floating_point() or index.is_complex() or index.dtype is torch.bool:
        return f"top_k_index must be integers, not {index.dtype}"
    if any(operand.device != tokens.device for operand in operands):
        devices = ", ".join(str(operand.device) for operand in operands)
        return f"all of experts' operands must be on one device, not on {devices}"
    step = BEGIN // tokens.element_size()
    for name, extent in (("width", width), ("inner", inner)):
        if extent % step:
            return (
                f"experts' {name} is {extent} and must be a multiple of {step}, so that rows of "
                f"{tokens.dtype} begin on {BEGIN} bytes: pad the operands with zeros"
            )
    return None
