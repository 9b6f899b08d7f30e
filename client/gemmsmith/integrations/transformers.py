"""transformers' experts by `gemmsmith.experts`, chosen by name.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")

transformers' own `grouped_mm` runs the same products in a block of `gemmsmith.patch()`. This does
with fewer passes over memory between them as well, where experts are SwiGLU without biases (Qwen's,
Mixtral's, DeepSeek's, OLMoE's); others get the products alone. Under autocast the products are in
its type, where transformers' own are in that of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemmsmith.ops.grouped import grouped_mm
from gemmsmith.ops.mixture import experts


def register_experts(name: str = "gemmsmith") -> None:
    """Make `name` known to transformers, as `experts_implementation` and to
    `model.set_experts_implementation`; for the rest of the process.

    Raises:
        ImportError: there is no transformers, or one without a registry of experts.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(name, experts_forward)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What experts make of tokens, as transformers' `grouped_mm_experts_forward`.

    Args:
        module: the experts, a class under transformers' `use_experts_implementation` of 5.17.
        hidden_states: [T, width].
        top_k_index: [T, chosen], experts' numbers; from `module.num_experts` on they are those of
            other ranks, and add nothing.
        top_k_weights: [T, chosen], what each of them counts for.

    Returns:
        [T, width], of the tokens' type.
    """
    if is_swiglu(module) and not torch.is_autocast_enabled(hidden_states.device.type):
        return experts(
            hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj
        )
    number, order = top_k_index.flatten().sort()
    last = torch.arange(module.num_experts, device=number.device)
    ends = torch.searchsorted(number, last, right=True, out_int32=True)
    # Rows after the last end are left as the memory was, forwards and backwards: each mask keeps
    # what may be no number out of the sums behind it, or before it in the backward pass.
    others = (number >= module.num_experts)[:, None]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        out = grouped_mm(rows, weight if module.is_transposed else weight.mT, ends)
        if module.has_bias:
            out = out + getattr(module, f"{name}_bias")[number.clamp(max=len(last) - 1)]
        return out.masked_fill(others, 0)

    rows = hidden_states[order // top_k_index.shape[-1]].masked_fill(others, 0)
    if module.has_gate:
        hidden = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        hidden = module.act_fn(product(rows, "up_proj"))
    shared = product(hidden, "down_proj") * top_k_weights.flatten()[order, None]
    found = shared[order.argsort()].view(*top_k_index.shape, -1)
    return found.sum(dim=1).to(hidden_states.dtype)


def is_swiglu(module: Any) -> bool:
    """Whether `gemmsmith.experts` computes what the experts do."""
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe

    plain = getattr(moe, "_default_apply_gate", None)  # not public: elsewhere it may be another
    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and type(module)._apply_gate is plain
        and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
        and module.gate_up_proj.dtype.itemsize == 2
    )
