"""The passes over memory between the products of a mixture of experts.

Each row of sorted tokens stands for a *slot*, one expert chosen for one token: `t * chosen + j` is
the j-th of token t. Rows from `used` on are no expert's; what they hold is never read.

On a GPU each pass is one Triton kernel, elsewhere torch's own operators say what it means. Sums are
FP32, in a fixed order.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def scatter(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each token in the rows of its slots: [T, width] at places [T, chosen] to [R, width].

    Read token by token, so that each is read once: row by row, an L2 of 50 MB forgot 16,384 tokens
    of 4 KB before their next slot.
    """
    if tokens.is_cuda:
        from gemmsmith.ops.products import triton_passes

        return triton_passes.scatter(tokens, places)
    rows = tokens.new_empty(places.numel(), tokens.shape[-1])
    rows[places] = tokens[:, None]
    return rows


def scatter_with_shares(
    tokens: torch.Tensor, shares: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the share of each row, [R] in FP32, of shares [T, chosen]."""
    if tokens.is_cuda:
        from gemmsmith.ops.products import triton_passes

        return triton_passes.scatter_with_shares(tokens, shares, places)
    of_rows = torch.empty(places.numel(), dtype=torch.float32, device=places.device)
    of_rows[places] = shares.float()
    return scatter(tokens, places), of_rows


def gather_sum(rows: torch.Tensor, places: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows: [R, width] at places [T, chosen] to [T, width]."""
    if rows.is_cuda:
        from gemmsmith.ops.products import triton_passes

        return triton_passes.gather_sum(rows, places, used)
    there = places < used
    found = rows[places.where(there, 0)].float()
    return found.where(there[..., None], 0).sum(dim=1).to(rows.dtype)


def activate(
    gate_up: torch.Tensor, shares: torch.Tensor, slots: torch.Tensor, used: torch.Tensor
) -> torch.Tensor:
    """`share * silu(gate) * up` of each row: [R, 2 * inner], and [T, chosen], to [R, inner]."""
    if gate_up.is_cuda:
        from gemmsmith.ops.products import triton_passes

        return triton_passes.activate(gate_up, shares, slots, used)
    gate, up = gate_up.float().chunk(2, dim=-1)
    hidden = functional.silu(gate) * up * shares.flatten()[slots, None].float()
    return hidden.where(_there(slots, used), 0).to(gate_up.dtype)


def activate_backward(
    gate_up: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    used: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `activate`, given the gradient [R, inner] of its result *without* the shares: the
    gradients of gate_up and of the shares, in their types and sizes, and its result again.
    """
    if gate_up.is_cuda:
        from gemmsmith.ops.products import triton_passes

        return triton_passes.activate_backward(gate_up, shares, slots, used, gradient)
    there = _there(slots, used)
    gate, up = gate_up.float().chunk(2, dim=-1)
    share, wanted = shares.flatten()[slots, None].float(), gradient.float()
    opened = torch.sigmoid(gate)
    hidden = gate * opened * up
    of_gate = wanted * share * up * opened * (1 + gate * (1 - opened))
    of_up = wanted * share * gate * opened
    of_gate_up = torch.cat([of_gate, of_up], dim=-1).where(there, 0).to(gate_up.dtype)
    of_shares = torch.zeros_like(shares).flatten()
    of_shares[slots] = (hidden * wanted).where(there, 0).sum(dim=-1).to(shares.dtype)
    again = (hidden * share).where(there, 0).to(gate_up.dtype)
    return of_gate_up, of_shares.view_as(shares), again


def _there(slots: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return (torch.arange(len(slots), device=slots.device) < used)[:, None]
