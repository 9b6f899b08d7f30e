"""transformers' experts by `gemmsmith.experts`, chosen by name.

    register_experts()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="gemmsmith")

transformers' own `grouped_mm` runs the same products in a block of `gemmsmith.patch()`. This does
with fewer passes over memory between them as well, where experts are SwiGLU without biases (Qwen's,
Mixtral's, DeepSeek's, OLMoE's); others get the products alone. Under autocast the products are in
its type, where transformers' own are in that of the weights.
"""

from __future__ import annotations

from gemmsmith.ops.models.expert_layers import experts_forward, learn


def register_experts(name: str = "gemmsmith") -> None:
    """Make `name` known to transformers, as `experts_implementation` and to
    `model.set_experts_implementation`; for the rest of the process.

    Raises:
        ImportError: there is no transformers, or one without a registry of experts.
    """
    from transformers.integrations.moe import ExpertsInterface

    learn()
    ExpertsInterface.register(name, experts_forward)
