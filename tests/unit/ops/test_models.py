"""Tiny models of transformers, unchanged but for `gemmsmith.patch(model)`."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.core.operation import Epilogue
from gemmsmith.ops.engine.engine import Engine
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser
from tests.support.tiny_models import MODELS, Tiny, recognized, table

Runs = Callable[[], int]
DOCS = Path(__file__).parents[3] / "docs" / "fusing.md"
BY_NAME = {tiny.name: tiny for tiny in MODELS}
MIXTURES = {"Qwen3-MoE", "Mixtral", "OLMoE", "DeepSeek-V2", "DeepSeek-V3", "GLM-4.5"}
WITHOUT_KERNEL = {"Nemotron": 2, "ModernBERT": 1, "gpt-oss": 2}
"""Layers with an activation and no bias, which no kernel has forwards; experts with biases, which
are computed on GPUs alone (`test_gpt_oss`)."""
WITHOUT_BACKWARD = {"SigLIP": 1}
"""An MLP that no loss depends on."""
NOTHING = {"Falcon", "CLIP", "Starcoder2", "BLOOM", "OPT", "T5"}
"""In which no product is recognized with what follows it."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's CPU products split their sums by what threads are free: bits differ otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def only_fused(chooser: Chooser) -> None:
    chooser.answers = lambda problem: (
        problem.operation.epilogue not in (Epilogue.NONE, Epilogue.BIAS)
        or problem.operation.is_grouped
    )


def with_products(model: nn.Module) -> Counter[str]:
    """What is recognized, without norms: those run no kernel of ours (test_norms.py)."""
    return Counter({kind: n for kind, n in recognized(model).items() if "rms norm" not in kind})


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_a_step(engine: Engine, chooser: Chooser, runs: Runs, tiny: Tiny) -> None:
    """To the bit without winners; within rounding with them, by so many kernels as there should."""
    model = tiny.model()
    expected, keys = tiny.step(model), list(model.state_dict())
    chooser.answers = lambda problem: False
    with gemmsmith.patch(model):
        found = tiny.step(model)
        assert list(model.state_dict()) == keys
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert runs() == 0

    engine._plans = {}
    only_fused(chooser)
    chooser.asked.clear()
    with gemmsmith.patch(model):
        found = tiny.step(model)
    count = runs()
    for name, one in expected.items():
        if name.endswith(("k_proj.bias", "key.bias")):
            continue  # softmax is blind to it: what gradient there is, is rounding
        bound = 0.06 * max(float(one.abs().max()), 1e-2)
        torch.testing.assert_close(found[name], one, rtol=0, atol=bound, msg=name)
    kinds = with_products(model)
    assert bool(kinds) is (tiny.name not in NOTHING)
    if tiny.name in MIXTURES:
        assert count >= 6 * sum(n for kind, n in kinds.items() if "experts" in kind)
    else:
        of_mlps = sum(n for kind, n in kinds.items() if "MLP (" in kind)
        fewer = WITHOUT_KERNEL.get(tiny.name, 0) + WITHOUT_BACKWARD.get(tiny.name, 0)
        assert count == kinds.total() + of_mlps - fewer
    assert not any(map(is_patched, model.modules()))


@pytest.mark.usefixtures("engine", "without_binding")
def test_gpt_oss(chooser: Chooser, runs: Runs) -> None:
    tiny = BY_NAME["gpt-oss"]
    model = tiny.model()
    assert with_products(model) == {"GptOssExperts (experts)": 2}
    expected = tiny.step(model)
    only_fused(chooser)
    with gemmsmith.patch(model):
        result = tiny.step(model)
    assert runs() == 2 * (6 + 1)  # and one that adds up the gradient of a bias
    for name, exact in expected.items():
        bound = 0.06 * max(float(exact.abs().max()), 1e-2)
        torch.testing.assert_close(result[name], exact, rtol=0, atol=bound, msg=name)


def test_the_documented_table_is_what_is_recognized() -> None:
    assert table() in DOCS.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Phi-3", "BERT", "Qwen3-MoE"])
def test_compiled_as_one_graph(engine: Engine, chooser: Chooser, runs: Runs, name: str) -> None:
    tiny = BY_NAME[name]
    model = tiny.model()
    wanted = next(iter(with_products(model))).partition(" ")[0]
    layer = next(one for one in model.modules() if type(one).__name__ == wanted)
    operands = _operands(layer)
    expected = layer(*operands)
    only_fused(chooser)
    with gemmsmith.patch(model):
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
        out = compiled(*operands)
        out.float().sum().backward()
    assert runs() > 0
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)


def _operands(layer: nn.Module) -> list[Any]:
    torch.manual_seed(13)
    tokens = torch.randn(8, 32).to(torch.bfloat16).requires_grad_()
    if "Experts" in type(layer).__name__:
        index = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
        return [tokens, index, torch.rand(8, 2).to(torch.bfloat16)]
    if "Output" in type(layer).__name__:
        return [tokens, torch.randn(8, 32).to(torch.bfloat16)]
    return [tokens]


def test_a_mixture_chooses_its_implementation_itself(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    """What was chosen for speed stays, and the configuration says what it said."""
    tiny = BY_NAME["Qwen3-MoE"]
    model = tiny.model()
    before = model.config._experts_implementation
    with gemmsmith.patch(model):
        assert model.config._experts_implementation == before
        model.set_experts_implementation("batched_mm")
        chooser.answers = lambda problem: problem.operation.is_grouped
        tiny.run(model)
        assert runs() == 0
        model.set_experts_implementation("eager")
        tiny.run(model)
        assert runs() == 2 * 2
    assert model.config._experts_implementation == "eager"


def test_a_model_is_saved_as_its_own_class(engine: Engine, tmp_path: Path) -> None:
    tiny = BY_NAME["Llama"]
    model = tiny.model()
    with gemmsmith.patch(model):
        model.save_pretrained(tmp_path)
        again = pickle.loads(pickle.dumps(model))
    assert type(again.model.layers[0].mlp) is type(model.model.layers[0].mlp)
    assert torch.equal(tiny.run(again), tiny.run(model))
    assert torch.equal(tiny.run(type(model).from_pretrained(tmp_path)), tiny.run(model))


def test_the_report_names_the_layers(engine: Engine, chooser: Chooser) -> None:
    tiny = BY_NAME["Llama"]
    model, file = tiny.model(), io.StringIO()
    only_fused(chooser)
    with gemmsmith.patch(model, report=True, file=file):
        tiny.step(model)
    text = file.getvalue()
    assert "  recognized: 2 × LlamaMLP (gated silu)\n" in text
    assert "  fused: 2 × silu_gate_aux, 2.000 ms less in all\n" in text


def test_a_capture_holds_what_could_be_fused() -> None:
    tiny = BY_NAME["Llama"]
    model = tiny.model()
    with gemmsmith.capture() as shapes, gemmsmith.patch(model):
        tiny.step(model)
    gated = [one for one in shapes.problems if one.operation.epilogue.is_gated]
    assert [(one.m, one.n, one.k, one.dtype) for one in gated] == [
        (12, 96, 32, "bf16.then_silu_gate_aux")
    ]
    assert shapes.problems[gated[0]] == 2
