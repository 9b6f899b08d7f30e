"""The passes over memory between the products of a mixture of experts.

Each row of sorted tokens stands for a *slot*, an expert chosen for a token: `t * chosen + j` is the
j-th of token t. Rows from `used` on belong to no expert, and are never read.

On a GPU each pass is one Triton kernel. Elsewhere it consists of torch's own operators, which can
be differentiated. Sums are FP32, in a fixed order.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from gemmsmith.ops.engine.by_triton import by_triton

_KERNELS = "gemmsmith.ops.products.triton_passes"


class Gate(NamedTuple):
    """`g * sigmoid(alpha * g) * (u + offset)` of gate g and up u: SwiGLU, or gpt-oss's.

    Attributes:
        alpha: of the sigmoid.
        limit: to which g is clamped from above, and u from both sides.
        offset: added to u.
        interleaved: whether even columns are the gate's and odd ones up's. Else: the two halves.
    """

    alpha: float = 1.0
    limit: float = inf
    offset: float = 0.0
    interleaved: bool = False


class Opening(NamedTuple):
    """What follows the first product of experts.

    Attributes:
        gate: makes the second product's operand.
        bias: [E, 2 * inner], added before.
        numbers: [T, chosen], the expert of each slot. None if there is no bias.
    """

    gate: Gate = Gate()
    bias: torch.Tensor | None = None
    numbers: torch.Tensor | None = None

    @property
    def is_swiglu(self) -> bool:
        return self.bias is None and self.gate == Gate()


SWIGLU = Opening()


@by_triton(_KERNELS)
def scatter(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each token in the rows of its slots: [T, width] at places [T, chosen] to [R, width].

    Token by token, so that each is read once: row by row, an L2 cache of 50 MB did not hold 16,384
    tokens of 4 KB until their next slot.
    """
    rows = tokens.new_empty(places.numel(), tokens.shape[-1])
    return rows.index_put((places,), tokens[:, None])


@by_triton(_KERNELS)
def scatter_with_shares(
    tokens: torch.Tensor, shares: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the share of each row, [R] in FP32, of shares [T, chosen]."""
    of_rows = torch.empty(places.numel(), dtype=torch.float32, device=places.device)
    of_rows[places] = shares.float()
    return scatter(tokens, places), of_rows


@by_triton(_KERNELS)
def gather_sum(rows: torch.Tensor, places: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows: [R, width] at places [T, chosen] to [T, width]."""
    there = places < used
    chosen = rows[places.where(there, 0)].float()
    return chosen.where(there[..., None], 0).sum(dim=1).to(rows.dtype)


def gather_shares(sums: torch.Tensor, places: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The gradient of the shares, [T, chosen] in FP32, from parts of each row's: [R, parts]."""
    there = places < used
    return sums.sum(dim=-1)[places].where(there, 0)


@by_triton(_KERNELS)
def activate(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    opening: Opening = SWIGLU,
) -> torch.Tensor:
    """`share * gate(g, u)` of each row: [R, 2 * inner], and [T, chosen], to [R, inner]."""
    gate, up = _gate_and_up(gate_up, slots, used, opening)
    alpha, limit, offset, _ = opening.gate
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = gate * torch.sigmoid(alpha * gate) * (up + offset)
    return (hidden * shares.flatten()[slots, None].float()).to(gate_up.dtype)


class ActivateGradients(NamedTuple):
    """The results of `activate_backward`; those that are not needed are None.

    Attributes:
        gate_up: the gradient of gate_up, of its size and type.
        shares: the gradient of the shares, of their size and type.
        again: the result of `activate`.
    """

    gate_up: torch.Tensor | None
    shares: torch.Tensor | None
    again: torch.Tensor | None


@by_triton(_KERNELS)
def activate_backward(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
    needs: tuple[bool, bool, bool],
    opening: Opening = SWIGLU,
) -> ActivateGradients:
    """Gradients of `activate` from the gradient [R, inner] of its result *without* the shares.

    Args:
        gate_up: [R, 2 * inner], without the bias.
        shares: [T, chosen].
        slots: [R].
        used: of one element.
        gradient: [R, inner].
        needs: which of the three parts of the result.
        opening: as of `activate`.
    """
    gate, up = _gate_and_up(gate_up, slots, used, opening)
    alpha, limit, offset, interleaved = opening.gate
    passes_gate, passes_up = ~(gate > limit), ~(up.abs() > limit)  # what is no number passes
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + offset
    share = shares.flatten()[slots, None].float()
    dy = gradient.where(_there(slots, used), 0).float()
    opened = torch.sigmoid(alpha * gate)
    hidden = gate * opened * up
    of_gate_up = of_shares = again = None
    if needs[0]:
        of_gate = dy * share * up * opened * (1 + alpha * gate * (1 - opened))
        of_up = dy * share * gate * opened
        both = of_gate.where(passes_gate, 0), of_up.where(passes_up, 0)
        of_gate_up = torch.stack(both, -1) if interleaved else torch.cat(both, -1)
        of_gate_up = of_gate_up.reshape(gate_up.shape).to(gate_up.dtype)
    if needs[1]:
        sums = (hidden * dy).sum(dim=-1).to(shares.dtype)
        of_shares = sums.new_empty(len(slots)).index_put((slots,), sums).view(shares.shape)
    if needs[2]:
        again = (hidden * share).to(gate_up.dtype)
    return ActivateGradients(of_gate_up, of_shares, again)


def _gate_and_up(
    gate_up: torch.Tensor, slots: torch.Tensor, used: torch.Tensor, opening: Opening
) -> tuple[torch.Tensor, torch.Tensor]:
    """In FP32, with the bias, of rows that belong to an expert. Others are zeros."""
    there = _there(slots, used)
    both = gate_up.where(there, 0).float()
    if opening.bias is not None and opening.numbers is not None:
        expert = opening.numbers.flatten()[slots].long().where(there[:, 0], 0)
        both = both + opening.bias[expert].float().where(there, 0)
    if opening.gate.interleaved:
        return both[..., 0::2], both[..., 1::2]
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def _there(slots: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(slots), device=slots.device) < used)[:, None]
