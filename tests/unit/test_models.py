"""The products of a model: of the suites' by name, and of a transformers configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmsmith.core.problem import Problem
from gemmsmith.errors import InvalidProblem
from tuner.models import Layer, of_config, of_suites, products
from tuner.suites import Pass, SuiteError

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48,
    "vocab_size": 151936,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
BERT = {
    "model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 30522,
    "num_attention_heads": 16, "num_hidden_layers": 24,
}  # fmt: skip


def layers(folder: Path, config: dict[str, Any]) -> list[Layer]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return of_config(path)


def problems(found: list[Layer], tokens: int, dtype: str = "bf16") -> set[tuple[str, int]]:
    return {(str(item.problem), item.count) for item in products(found, tokens, dtype)}


def test_a_configuration_has_the_sizes_of_the_suites_model(tmp_path: Path) -> None:
    ours = problems(layers(tmp_path, LLAMA), 4096)
    assert {text for text, _ in ours} == {
        text for text, _ in problems(of_suites("llama-3-8b"), 4096)
    }
    assert ("4096×6144×4096 bf16 tn", 32) in ours
    assert ("4096×128256×4096 bf16 tn", 1) in ours
    assert len(ours) == 15


def test_experts_get_the_routed_tokens(tmp_path: Path) -> None:
    ours = problems(layers(tmp_path, QWEN_MOE), 1024)
    assert ("128×8192×1536×2048 bf16.group_rows tn", 48) in ours
    assert ("128×8192×2048×1536 bf16.group_rows tt", 48) in ours
    assert ("128×1536×2048×8192 bf16.group_depth nt", 48) in ours
    assert ("1024×5120×2048 bf16 tn", 48) in ours


def test_weights_of_gpt2_lie_the_other_way_round(tmp_path: Path) -> None:
    ours = problems(layers(tmp_path, GPT2), 1024)
    assert {
        ("1024×2304×768 bf16 tt", 12),  # forward
        ("1024×768×2304 bf16 tn", 12),
        ("768×2304×1024 bf16 nt", 12),
        ("1024×50257×768 bf16 tn", 1),  # its head is a plain linear layer
    } <= ours


def test_a_model_without_gates_and_head(tmp_path: Path) -> None:
    ours = problems(layers(tmp_path, BERT), 512)
    assert ("512×4096×1024 bf16 tn", 24) in ours
    assert not any("30522" in text for text, _ in ours)


def test_a_multimodal_configuration_has_a_text_model(tmp_path: Path) -> None:
    assert layers(tmp_path, {"model_type": "any", "text_config": LLAMA}) == layers(tmp_path, LLAMA)


def test_a_type_without_gradients_has_forward_products_only() -> None:
    found = products(of_suites("llama-3-8b"), 64, "fp8_e4m3")
    assert {item.which for item in found} == {Pass.FORWARD}
    assert Problem(m=64, n=6144, k=4096, dtype="fp8_e4m3") in {item.problem for item in found}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a model's config.json"),
        ("[]", "is not a model's config.json"),
        ("{}", "lacks 'model_type'"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not known; known are bert"),
        ('{"model_type": "llama"}', "lacks 'hidden_size'"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "is not a model's config.json"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "is not a model's config.json"),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(SuiteError) as refused:
        of_config(path)
    assert said in str(refused.value)
    with pytest.raises(SuiteError, match="no file"):
        of_config(tmp_path / "missing.json")


def test_an_unknown_model_names_those_that_are_like_it() -> None:
    with pytest.raises(SuiteError, match="choose one of llama-3-70b, llama-3-8b"):
        of_suites("llama")
    with pytest.raises(InvalidProblem, match="dtype"):
        products(of_suites("llama-3-8b"), 64, "bf17")
