"""Which rows the tokens of a mixture of experts take, sorted by the experts they go to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gemmsmith.ops.engine.by_triton import by_triton

_SMALL = 255
"""Most experts whose numbers are sorted as bytes, in one pass. One number is for other ranks."""


class Routing(NamedTuple):
    """Which slot each row of sorted tokens stands for; see passes.py.

    Attributes:
        slots: [R] int64, R = T * chosen.
        places: [T, chosen] int64, the row of each slot.
        ends: [E] int32, where each expert's rows end. Rows from the last on belong to other ranks.
    """

    slots: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor

    @property
    def used(self) -> torch.Tensor:
        """How many rows belong to an expert of this rank; on the device."""
        return self.ends[-1:]


@by_triton("gemmsmith.ops.products.triton_routing")
def route(top_k_index: torch.Tensor, number: int) -> Routing:
    """The routing of tokens to that many experts, by [T, chosen] numbers."""
    flat = top_k_index.flatten().to(torch.int64)
    flat = flat.where((flat >= 0) & (flat < number), number)
    if number <= _SMALL:
        flat = flat.to(torch.uint8)
    of_row, slots = flat.sort(stable=True)
    last = torch.arange(number, device=flat.device, dtype=of_row.dtype)
    ends = torch.searchsorted(of_row, last, right=True, out_int32=True)
    rows = torch.arange(len(slots), device=slots.device)
    places = torch.empty_like(slots).scatter_(0, slots, rows)
    return Routing(slots=slots, places=places.view(top_k_index.shape), ends=ends)
