"""Unchanged models of transformers with fused products, and compiled graphs with the pass.

A model in FP32 is the reference; what needs no CUDA runs on the host as well, with stand-in
kernels: tests/unit/ops/test_models.py and test_inductor.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import gemmsmith
from gemmsmith.device import DeviceModel
from gemmsmith.operation import Operation
from gemmsmith.problem import DType, Problem
from tests.gpu.support.building import build
from tests.gpu.support.choosing import Ground, tuned
from tuner.backends import Level, kernels, refusal

transformers = pytest.importorskip("transformers")

OPERATIONS = tuple(
    Operation.of("bf16", epilogue=each)
    for each in (
        "silu_gate",
        "silu_gate_aux",
        "bias_gelu_tanh",
        "bias_gelu_tanh_aux",
        "bias_gelu",
        "bias_gelu_aux",
        "residual",
        "bias_residual",
    )
) + tuple(Operation.of("bf16", "tt", epilogue=f"bias_gelu_tanh{each}") for each in ("", "_aux"))
"""What the models below have; GPT-2's weights lie in rows."""

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama": (
        "LlamaConfig",
        {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
        2,
    ),
    "GPT2": ("GPT2Config", {"n_embd": 512, "n_layer": 2, "n_head": 8}, 2),
    "GPTNeoX": (
        "GPTNeoXConfig",
        {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        2,
    ),
}
"""The configuration's class, its fields, and how many fused products a forward pass has."""

OUTPUT_BOUND = 3e-2
"""Relative error in the Frobenius norm, of two layers in bf16 against FP32."""
GRADIENT_BOUND = 6e-2


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, model: DeviceModel) -> Ground:
    chosen = [
        kernel
        for operation in OPERATIONS
        for kernel in kernels(Problem.of(operation, 4096, 1024, 1024), level=Level.CORE)[:2]
    ]
    store, _ = build(chosen, tmp_path_factory)
    return Ground(
        device=torch.device("cuda:0"),
        model=model,
        types=(DType.BF16,),
        sizes=(512, 1024, 1536),
        largest=4096,
        kernels=lambda problem: [one for one in chosen if refusal(one, problem) is None],
        store=store,
        compilers=({},),
    )


def pair(name: str) -> tuple[Any, Any, torch.Tensor]:
    """The model in bf16, the same in FP32, and tokens."""
    config, fields, _ = MODELS[name]
    layers = {} if "n_layer" in fields else {"num_hidden_layers": 2}
    made = getattr(transformers, config)(**fields, **layers, vocab_size=1024)
    torch.manual_seed(20261123)
    narrow = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    narrow = narrow.eval().to("cuda")
    tokens = torch.randint(1024, (4, 128), device="cuda")
    return narrow, copy.deepcopy(narrow).float(), tokens


def step(model: Any, call: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    out = call(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    return out.logits.detach(), grads


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= bound


def hold(found: Any, expected: Any) -> None:
    close(found[0], expected[0], OUTPUT_BOUND)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        if float(theirs.norm()) > 1e-6:  # a key's bias has no gradient but rounding
            close(mine, theirs, GRADIENT_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_trains_as_torchs(ground: Ground, name: str) -> None:
    narrow, wide, tokens = pair(name)
    expected = step(wide, wide, tokens)
    with tuned(ground) as launched:
        with gemmsmith.patch(narrow):
            hold(step(narrow, narrow, tokens), expected)
        assert launched() == MODELS[name][2]
        step(narrow, narrow, tokens)
        assert launched() == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_in_a_compiled_graph(ground: Ground, name: str) -> None:
    narrow, wide, tokens = pair(name)
    expected = step(wide, wide, tokens)
    with tuned(ground) as launched, gemmsmith.patch(narrow):
        hold(step(narrow, torch.compile(narrow, dynamic=False), tokens), expected)
        assert launched() == MODELS[name][2]


@pytest.mark.parametrize("name", MODELS)
def test_the_pass_over_inductors_graphs(ground: Ground, name: str) -> None:
    """It finds what `patch` does, and residuals."""
    narrow, wide, tokens = pair(name)
    expected = step(wide, wide, tokens)
    with tuned(ground) as launched:
        options = {"joint_custom_pre_pass": gemmsmith.inductor_pass()}
        hold(step(narrow, torch.compile(narrow, options=options, dynamic=False), tokens), expected)
        assert launched() > MODELS[name][2]
