"""transformers' experts computed by `gemmsmith.experts`, selected by name.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")

In a block of `gemmsmith.patch()`, transformers' own `grouped_mm` runs the same products. This
implementation also needs fewer passes over memory between the products if the experts are SwiGLU
without biases (Qwen, Mixtral, DeepSeek, OLMoE), or have a clamped gate (gpt-oss). Under autocast
the products are computed in autocast's type; transformers' own are computed in the weights' type.
"""

from __future__ import annotations

from gemmsmith.ops.models.expert_layers import experts_forward, learn


def register_experts(name: str = "gemmsmith") -> None:
    """Register `name` with transformers for the rest of the process.

    It can then be passed as `experts_implementation` and to `model.set_experts_implementation`.

    Raises:
        ImportError: transformers is not installed, or has no registry of experts.
    """
    from transformers.integrations.moe import ExpertsInterface

    learn()
    ExpertsInterface.register(name, experts_forward)
