"""What a kernel's epilogue has beside the product's operands and D."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Beside(NamedTuple):
    """What an epilogue reads and writes: tensors that the plan `suits`, and the plan's `aux`.

    A backward one reads `aux`, of D's size, and writes `activated` and `bias_gradient` where it has
    them.

    Attributes:
        up: of a gated one, beside `b`, the gate's.
        scale_d: of an FP8 D, one FP32 element; None: 1.
        amax: likewise, to which its largest absolute value is added; None: nobody asks.
        row_scale: [M] contiguous FP32 factors of rows.
        column_scale: [N] factors of columns, of a bias's type.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    aux: torch.Tensor | None = None
    up: torch.Tensor | None = None
    activated: torch.Tensor | None = None
    bias_gradient: torch.Tensor | None = None
    scale_d: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None
