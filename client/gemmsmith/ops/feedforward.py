"""`gemmsmith.mlp`: a feed-forward layer, plain or gated, of the layers that kernels fuse."""

from __future__ import annotations

import torch

from gemmsmith.epilogue import Activation
from gemmsmith.ops.fused import linear
from gemmsmith.ops.gated import gated_linear


def mlp(
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = Activation.SILU.value,
    interleaved: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """A feed-forward layer: `linear` or `gated_linear`, then `linear`; [..., K] to [..., N].

    Args:
        x: any number of leading dimensions.
        weight: [I, K] for a plain layer; for a gated one [2·I, K], or the gate's if `up` is given.
        down: [N, I].
        up: [I, K] of a gated layer.
        bias: of the first product; see `linear` and `gated_linear`.
        down_bias: [N].
        activation: as in `linear`; for a gated layer as in `gated_linear`.
        interleaved: see `gated_linear`.
        residual: added to the result.

    Raises:
        ValueError: `down` takes neither the weight's rows nor half of them; as `linear` and
            `gated_linear` say.
        RuntimeError: raised by torch if sizes or types do not match.
    """
    rows, inner = weight.shape[0], down.shape[1]
    if up is not None or rows == 2 * inner:
        hidden = gated_linear(x, weight, up, bias, activation=activation, interleaved=interleaved)
    elif rows == inner and not interleaved:
        hidden = linear(x, weight, bias, activation=activation)
    else:
        raise ValueError(
            f"down {list(down.shape)} takes {inner} columns, and weight {list(weight.shape)} gives "
            f"{rows}: a gated layer's weight has {2 * inner} rows, a plain one's {inner}"
        )
    return linear(hidden, down, down_bias, residual=residual)
