"""transformers' mixtures of experts: unchanged under `patch`, and by the name `gemmsmith`."""

from __future__ import annotations

import ast
import copy
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GptOssConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import gemmsmith
from gemmsmith.integrations import transformers as ours
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import expert_layers
from tests.support.stand_in import Chooser

BF16 = torch.bfloat16
Runs = Callable[[], int]
T, WIDTH, FEED, EXPERTS, CHOSEN, LAYERS = 12, 32, 16, 8, 2, 2
QWEN: dict[str, Any] = {
    "hidden_size": WIDTH, "moe_intermediate_size": FEED, "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(without_binding: None) -> Iterator[None]:
    """The registry is left as it was."""
    ours.register_experts()
    yield
    del ExpertsInterface._global_mapping["gemmsmith"]


def model(implementation: str | None, dtype: torch.dtype = BF16) -> Any:
    torch.manual_seed(7)
    how = {} if implementation is None else {"experts_implementation": implementation}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**QWEN), dtype=dtype, **how)


def step(net: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and the gradients by parameter."""
    tokens = (torch.arange(2 * T).view(2, T) * 7) % 64
    loss = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in net.named_parameters()}


def close(found: Any, expected: Any) -> None:
    """In bf16: within some of its roundings of the largest gradient of each parameter."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)
    for name, grad in expected[1].items():
        bound = 0.05 * float(grad.abs().max())
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=bound, msg=name)


def grouped(chooser: Chooser) -> int:
    return sum(one.operation.is_grouped and not one.operation.is_fused for one in chooser.asked)


def test_an_unchanged_model_comes_down_to_torchs_grouped_product() -> None:
    net = model(None)
    assert net.config._experts_implementation == "grouped_mm"
    with gemmsmith.capture() as shapes:
        step(net)
    counts = [count for problem, count in shapes.problems.items() if problem.operation.is_grouped]
    assert counts == [LAYERS] * 6


@pytest.mark.parametrize("implementation", ["grouped_mm", "gemmsmith"])
def test_a_patched_model_runs_kernels(
    engine: Engine, chooser: Chooser, runs: Runs, implementation: str
) -> None:
    expected = step(model("eager"))
    assert runs() == 0
    with gemmsmith.patch():
        close(step(model(implementation)), expected)
    assert grouped(chooser) == 6
    # Of each layer q, k, v, o, the router, gate_up and down, and the head: three products each.
    assert runs() == 3 * (7 * LAYERS + 1)


def test_the_registered_experts_need_no_patch(engine: Engine, chooser: Chooser, runs: Runs) -> None:
    net = model("eager")
    expected = step(net)
    net.zero_grad()
    net.set_experts_implementation("gemmsmith")
    close(step(net), expected)
    assert grouped(chooser) == 6
    assert len(chooser.asked) == 8  # and once for the gate, forwards and backwards
    assert runs() == 6 * LAYERS


def test_under_autocast(engine: Engine, runs: Runs) -> None:
    """FP32 weights, as transformers' own trainer keeps them."""
    with torch.autocast("cpu", BF16):
        expected = step(model("eager", torch.float32))
        close(step(model("gemmsmith", torch.float32)), expected)
    assert runs() == 6 * LAYERS


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("implementation", ["grouped_mm", "gemmsmith"])
def test_compiled(engine: Engine, chooser: Chooser, implementation: str) -> None:
    net = model(implementation).model.layers[0].mlp
    eagerly = copy.deepcopy(net)
    x = torch.randn(1, T, WIDTH, dtype=BF16, requires_grad=True)
    compiled = torch.compile(net, fullgraph=True, dynamic=False, backend="aot_eager")
    with gemmsmith.patch():
        out = compiled(x)
        out.sum().backward()
    assert grouped(chooser) == 6
    torch.testing.assert_close(out, eagerly(x), rtol=2e-2, atol=1e-4)


KINDS = {
    "qwen3": (Qwen3MoeExperts, Qwen3MoeConfig(**QWEN)),
    "transposed, with biases": (
        GptOssExperts,
        GptOssConfig(hidden_size=WIDTH, intermediate_size=FEED, num_local_experts=EXPERTS),
    ),
    "without gate": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=WIDTH, moe_intermediate_size=FEED, n_routed_experts=EXPERTS),
    ),
}


def experts(kind: str) -> Any:
    """Of random weights, in FP32."""
    made, config = KINDS[kind]
    net = made(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return net


def run(
    net: Any, implementation: str, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients of the tokens, the shares and the weights."""
    net.zero_grad()
    net.config._experts_implementation = implementation
    x, share = x.detach().requires_grad_(), share.detach().requires_grad_()
    out = net(x, index, share)
    weights = list(net.parameters())
    return [out.detach(), *torch.autograd.grad((out * out.detach()).sum(), [x, share, *weights])]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_transformers_own(kind: str) -> None:
    """Four of the experts have no tokens."""
    net, x = experts(kind), torch.randn(T, WIDTH)
    index = torch.tensor([[0, 2], [2, 3], [7, 0]]).repeat(T // 3, 1)
    given = (x, index, torch.rand(T, CHOSEN))
    for found, expected in zip(
        run(net, "gemmsmith", *given), run(net, "eager", *given), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_other_ranks_add_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever kernels leave in the rows that are nobody's."""
    monkeypatch.setattr(expert_layers, "grouped_mm", Poisoned.apply)
    net, x = experts(kind), torch.randn(T, WIDTH)
    index = torch.randint(EXPERTS, (T, CHOSEN))
    away = torch.rand(T, CHOSEN) < 0.4
    away[0] = True
    share = torch.rand(T, CHOSEN)
    found = run(net, "gemmsmith", x, index.masked_fill(away, EXPERTS), share)
    expected = run(net, "eager", x, index, share.masked_fill(away, 0))
    expected[2] = expected[2].masked_fill(away, 0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Poisoned(torch.autograd.Function):
    """The grouped product, with NaN wherever kernels write nothing."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b, offs)
        out = torch._grouped_mm(a, b, offs=offs)
        out[int(offs[-1]) :] = torch.nan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        a, b, offs = ctx.saved_tensors
        last = int(offs[-1])
        da = torch._grouped_mm(grads[0], b.mT, offs=offs)
        da[last:] = torch.nan
        return da, torch._grouped_mm(a[:last].mT, grads[0][:last], offs=offs), None


CLAMPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss.GptOss": ("GptOssConfig", {"intermediate_size": FEED}),
    "openai_privacy_filter.OpenAIPrivacyFilter": (
        "OpenAIPrivacyFilterConfig", {"intermediate_size": FEED},
    ),
    "minimax_m3_vl.MiniMaxM3VL": ("MiniMaxM3VLTextConfig", {"intermediate_size": FEED}),
    "deepseek_v4.DeepseekV4": ("DeepseekV4Config", {"moe_intermediate_size": FEED}),
    "hy_v4.HYV4": ("HYV4Config", {"moe_intermediate_size": FEED}),
    "glm5_next.Glm5NextText": ("Glm5NextTextConfig", {"moe_intermediate_size": FEED}),
}  # fmt: skip
"""Experts with a gate that is clamped, by module and class."""


def clamped_experts(name: str) -> Any:
    """In bf16, with some of gate and up beyond the limit."""
    module, _, kind = name.partition(".")
    config, fields = CLAMPED[name]
    made = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    sizes = {"hidden_size": WIDTH, "num_local_experts": EXPERTS, "num_experts": EXPERTS, **fields}
    net = getattr(made, f"{kind}Experts")(getattr(transformers, config)(**sizes)).to(BF16)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for limit in {"limit", "swiglu_limit"} & vars(net).keys():
        setattr(net, limit, 1.5)
    return net


@pytest.mark.parametrize("implementation", ["grouped_mm", "gemmsmith"])
@pytest.mark.parametrize("name", CLAMPED)
def test_clamped_experts_are_as_exact_as_transformers_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, implementation: str
) -> None:
    net, x = clamped_experts(name), torch.randn(T, WIDTH).to(BF16)
    index = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(T)])
    share = torch.rand(T, CHOSEN).to(BF16)
    exact = run(copy.deepcopy(net).double(), "eager", x.double(), index, share.double())
    own = run(net, "grouped_mm", x, index, share)
    calls: list[None] = []
    computed = expert_layers.computed
    monkeypatch.setattr(expert_layers, "computed", lambda of: (calls.append(None), computed(of))[1])
    with gemmsmith.patch(net):
        result = run(net, implementation, x, index, share)
        run(net, "eager", x, index, share)  # which may be of another precision
    assert len(calls) == 1
    for mine, other, exactly in zip(result, own, exact, strict=True):
        assert mine.stride() == other.stride()
        size = exactly.norm()
        assert (mine - exactly).norm() / size <= 1.1 * (other - exactly).norm() / size + 1e-3


def test_transformers_is_not_imported_before_it_is_needed() -> None:
    module = ast.parse(Path(ours.__file__).read_text(encoding="utf-8"))
    at_once = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert at_once
    assert not any("transformers" in ast.unparse(node) for node in at_once)


def test_the_page_says_how_to_choose_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    [lines] = [
        one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "experts" in one
    ]
    net = model(None)
    exec(compile(lines, "docs/training.md", "exec"), {"model": net})
    assert net.config._experts_implementation == "gemmsmith"
