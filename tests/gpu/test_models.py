"""Unchanged models of transformers with fused products, and compiled graphs with the pass.

A model in FP32 is the reference; what needs no CUDA runs on the host as well, with stand-in
kernels: tests/unit/ops/test_models.py and test_inductor.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import gemmsmith
from gemmsmith.core.device import DeviceModel
from gemmsmith.core.operation import Operation
from gemmsmith.core.problem import Problem
from gemmsmith.ops.engine.plan import Plan
from tests.gpu.support.choosing import Ground, first_kernels, tuned
from tests.gpu.support.counting import launches

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
) + tuple(
    Operation.of("bf16", layout, epilogue=epilogue)
    for epilogue, layout in (
        ("bias_gelu_tanh", "tt"),
        ("bias_gelu_tanh_aux", "tt"),
        ("bias_residual", "tt"),
        ("dsilu_gate", "tt"),
        ("dgelu_bgrad", "tt"),
        ("dgelu_tanh_bgrad", "tn"),
    )
)
"""What the models below have; GPT-2's weights lie in rows."""

LAYERS = 2
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "Llama": (
        "LlamaConfig",
        {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8},
        ("silu_gate_aux", "dsilu_gate"),
    ),
    "GPT2": (
        "GPT2Config",
        {"n_embd": 512, "n_layer": LAYERS, "n_head": 8},
        ("bias_gelu_tanh_aux", "dgelu_tanh_bgrad"),
    ),
    "GPTNeoX": (
        "GPTNeoXConfig",
        {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        ("bias_gelu_aux", "dgelu_bgrad"),
    ),
}
"""The configuration's class, its fields, and the fused products of a layer, both ways."""

OUTPUT_BOUND = 3e-2
"""Relative error in the Frobenius norm, of two layers in bf16 against FP32."""
GRADIENT_BOUND = 6e-2


@pytest.fixture(scope="module")
def ground(model: DeviceModel) -> Ground:
    problems = [Problem.of(operation, 4096, 1024, 1024) for operation in OPERATIONS]
    return Ground.of(model, first_kernels(problems, 2), sizes=(512, 1024, 1536), compilers=({},))


def pair(ground: Ground, name: str) -> tuple[Any, Any, torch.Tensor]:
    """The model in bf16, the same in FP32, and tokens."""
    config, fields, _ = MODELS[name]
    layers = {} if "n_layer" in fields else {"num_hidden_layers": LAYERS}
    made = getattr(transformers, config)(**fields, **layers, vocab_size=1024)
    torch.manual_seed(20261123)
    narrow = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    narrow = narrow.eval().to(ground.device)
    tokens = torch.randint(1024, (4, 128), device=ground.device)
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


def epilogues(launched: list[Plan]) -> Counter[str]:
    return Counter(plan.shape.problem.operation.epilogue.value for plan in launched)


def both_ways(name: str) -> dict[str, int]:
    """Each MLP's first product, and the input gradient of its second one."""
    return dict.fromkeys(MODELS[name][2], LAYERS)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_trains_as_torchs(ground: Ground, name: str) -> None:
    narrow, wide, tokens = pair(ground, name)
    expected = step(wide, wide, tokens)
    with tuned(ground), launches() as launched:
        with gemmsmith.patch(narrow):
            hold(step(narrow, narrow, tokens), expected)
        assert epilogues(launched) == both_ways(name)
        launched.clear()
        step(narrow, narrow, tokens)
        assert not launched


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_in_a_compiled_graph(ground: Ground, name: str) -> None:
    narrow, wide, tokens = pair(ground, name)
    expected = step(wide, wide, tokens)
    with tuned(ground), launches() as launched, gemmsmith.patch(narrow):
        hold(step(narrow, torch.compile(narrow, dynamic=False), tokens), expected)
        assert epilogues(launched) == both_ways(name)


@pytest.mark.parametrize("name", MODELS)
def test_the_pass_over_inductors_graphs(ground: Ground, name: str) -> None:
    """It finds what `patch` does, and residuals."""
    narrow, wide, tokens = pair(ground, name)
    expected = step(wide, wide, tokens)
    with tuned(ground) as launched:
        options = {"joint_custom_pre_pass": gemmsmith.inductor_pass()}
        hold(step(narrow, torch.compile(narrow, options=options, dynamic=False), tokens), expected)
        assert launched() > LAYERS
