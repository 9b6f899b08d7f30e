"""Tiny models of transformers' classes with random weights, and a training step.

A table in docs/fusing.md lists what `gemmsmith.patch(model)` recognizes in them:

    python -m tests.support.tiny_models
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

BF16 = torch.bfloat16
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MOE: dict[str, Any] = {
    **TEXT,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model.

    Attributes:
        name: name in the documentation.
        config: name of the configuration's class.
        fields: fields of the configuration.
        made_by: name of the class that makes the model.
    """

    name: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    made_by: str = "AutoModelForCausalLM"

    def model(self, dtype: torch.dtype = BF16) -> Any:
        """A model with the same weights each time, without dropout."""
        torch.manual_seed(11)
        config = getattr(transformers, self.config)(**self.fields)
        return getattr(transformers, self.made_by).from_config(config, dtype=dtype).eval()

    def run(self, model: Any) -> torch.Tensor:
        """The output of the model for a fixed input."""
        if self.fields.get("image_size"):
            torch.manual_seed(12)
            given = {"pixel_values": torch.randn(2, 3, 16, 16, dtype=model.dtype)}
        else:
            given = {"input_ids": (torch.arange(12).view(2, 6) * 7) % 61 + 3}
            if model.config.is_encoder_decoder:
                given["decoder_input_ids"] = given["input_ids"]
            elif self.made_by == "AutoModelForCausalLM":
                given["use_cache"] = False
        out: torch.Tensor = model(**given)[0]
        return out

    def step(self, model: Any) -> dict[str, torch.Tensor]:
        """The output, and the gradients by parameter."""
        model.zero_grad()
        out = self.run(model)
        (out.float().square() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {"output": out.detach(), **grads}


def _without(*names: str, of: dict[str, Any] = TEXT, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in of.items() if name not in names} | more


_SHARED: dict[str, Any] = {
    **MOE,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}

MODELS = (
    Tiny(name="Llama", config="LlamaConfig", fields=TEXT),
    Tiny(name="Qwen2", config="Qwen2Config", fields=TEXT),
    Tiny(name="Qwen3", config="Qwen3Config", fields={**TEXT, "head_dim": 16}),
    Tiny(name="Mistral", config="MistralConfig", fields=TEXT),
    Tiny(name="Gemma", config="GemmaConfig", fields={**TEXT, "head_dim": 16}),
    Tiny(name="Gemma 2", config="Gemma2Config", fields={**TEXT, "head_dim": 16}),
    Tiny(name="Gemma 3", config="Gemma3TextConfig", fields={**TEXT, "head_dim": 16}),
    Tiny(name="Phi", config="PhiConfig", fields=TEXT),
    Tiny(name="Phi-3", config="Phi3Config", fields=TEXT),
    Tiny(name="GLM", config="GlmConfig", fields={**TEXT, "head_dim": 16}),
    Tiny(name="Cohere", config="CohereConfig", fields=TEXT),
    Tiny(name="OLMo 2", config="Olmo2Config", fields=TEXT),
    Tiny(name="Granite", config="GraniteConfig", fields=TEXT),
    Tiny(name="SmolLM3", config="SmolLM3Config", fields=TEXT),
    Tiny(name="StableLM", config="StableLmConfig", fields=TEXT),
    Tiny(name="Nemotron", config="NemotronConfig", fields={**TEXT, "head_dim": 16}),
    Tiny(name="GPT-2", config="GPT2Config", fields=_GPT2),
    Tiny(name="GPT-J", config="GPTJConfig", fields={**_GPT2, "rotary_dim": 4}),
    Tiny(name="GPT-NeoX", config="GPTNeoXConfig", fields=_without("num_key_value_heads")),
    Tiny(name="Falcon", config="FalconConfig", fields={**TEXT, "bias": True}),
    Tiny(name="BERT", config="BertConfig", fields=TEXT, made_by="AutoModelForMaskedLM"),
    Tiny(name="RoBERTa", config="RobertaConfig", fields=TEXT, made_by="AutoModelForMaskedLM"),
    Tiny(name="ELECTRA", config="ElectraConfig", fields=TEXT, made_by="AutoModelForMaskedLM"),
    Tiny(
        name="ModernBERT",
        config="ModernBertConfig",
        fields={**TEXT, "cls_token_id": 1, "sep_token_id": 2},
        made_by="AutoModelForMaskedLM",
    ),
    Tiny(name="ViT", config="ViTConfig", fields=VISION, made_by="AutoModel"),
    Tiny(name="DINOv2", config="Dinov2Config", fields=VISION, made_by="AutoModel"),
    Tiny(name="SigLIP", config="SiglipVisionConfig", fields=VISION, made_by="AutoModel"),
    Tiny(name="CLIP", config="CLIPVisionConfig", fields=VISION, made_by="AutoModel"),
    Tiny(name="Qwen3-MoE", config="Qwen3MoeConfig", fields={**MOE, "num_experts": 4}),
    Tiny(name="Mixtral", config="MixtralConfig", fields={**MOE, "num_local_experts": 4}),
    Tiny(name="OLMoE", config="OlmoeConfig", fields={**MOE, "num_experts": 4}),
    Tiny(
        name="DeepSeek-V2",
        config="DeepseekV2Config",
        fields={**_SHARED, **_LATENT, "num_experts": 4, "q_lora_rank": None, "head_dim": 8},
    ),
    Tiny(
        name="DeepSeek-V3",
        config="DeepseekV3Config",
        fields={**_SHARED, **_LATENT, "q_lora_rank": 16},
    ),
    Tiny(name="GLM-4.5", config="Glm4MoeConfig", fields={**_SHARED, "head_dim": 16}),
    Tiny(
        name="gpt-oss",
        config="GptOssConfig",
        fields={**TEXT, "num_local_experts": 4, "head_dim": 16},
    ),
    Tiny(name="Starcoder2", config="Starcoder2Config", fields=TEXT),
    Tiny(
        name="BLOOM",
        config="BloomConfig",
        fields={"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    ),
    Tiny(
        name="OPT",
        config="OPTConfig",
        fields=_without(
            "intermediate_size", "num_key_value_heads", ffn_dim=48, word_embed_proj_dim=32
        ),
    ),
    Tiny(
        name="T5",
        config="T5Config",
        fields={
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        made_by="AutoModelForSeq2SeqLM",
    ),
)


def recognized(model: torch.nn.Module) -> Counter[str]:
    """The number of layers that a patch replaces, by kind."""
    from gemmsmith.ops.models import layers

    return Counter(map(str, layers.recognized(model)))


def table(rows: Callable[[Tiny], Counter[str]] = lambda tiny: recognized(tiny.model())) -> str:
    """A Markdown table of the models and their recognized layers."""
    lines = ["| model | recognized, in two layers |", "|---|---|"]
    for tiny in MODELS:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in rows(tiny).items())
        lines.append(f"| {tiny.name} | {kinds or 'nothing'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
