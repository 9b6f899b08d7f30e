"""The passes over memory between the products of a mixture of experts.

Each row of sorted tokens stands for a *slot*, an expert chosen for a token: `t * chosen + j` is the
j-th of token t. Rows from `used` on belong to no expert, and are never read.

On a GPU each pass is one Triton kernel. Elsewhere it consists of torch's own operators, which can
be differentiated. Sums are FP32, in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from gemmsmith.ops.engine.by_triton import by_triton

_KERNELS = "gemmsmith.ops.products.triton_passes"


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
    gate_up: torch.Tensor, shares: torch.Tensor, slots: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """`share * silu(gate) * up` of each row: [R, 2 * inner], and [T, chosen], to [R, inner]."""
    gate, up = gate_up.where(_there(slots, used), 0).float().chunk(2, dim=-1)
    hidden = functional.silu(gate) * up * shares.flatten()[slots, None].float()
    return hidden.to(gate_up.dtype)


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
) -> ActivateGradients:
    """Gradients of `activate` from the gradient [R, inner] of its result *without* the shares.

    Args:
        gate_up: [R, 2 * inner].
        shares: [T, chosen].
        slots: [R].
        used: of one element.
        gradient: [R, inner].
        needs: which of the three parts of the result.
    """
    there = _there(slots, used)
    gate, up = gate_up.where(there, 0).float().chunk(2, dim=-1)
    share, dy = shares.flatten()[slots, None].float(), gradient.where(there, 0).float()
    opened = torch.sigmoid(gate)
    hidden = gate * opened * up
    of_gate_up = of_shares = again = None
    if needs[0]:
        of_gate = dy * share * up * opened * (1 + gate * (1 - opened))
        of_up = dy * share * gate * opened
        of_gate_up = torch.cat([of_gate, of_up], dim=-1).to(gate_up.dtype)
    if needs[1]:
        sums = (hidden * dy).sum(dim=-1).to(shares.dtype)
        of_shares = sums.new_empty(len(slots)).index_put((slots,), sums).view(shares.shape)
    if needs[2]:
        again = (hidden * share).to(gate_up.dtype)
    return ActivateGradients(of_gate_up, of_shares, again)


def _there(slots: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(slots), device=slots.device) < used)[:, None]
