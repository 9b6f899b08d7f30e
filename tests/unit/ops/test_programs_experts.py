"""Experts and norms of a patched model in programs that differentiate, observe, listen or replace.

As test_programs_observed.py and test_programs_replaced.py, of layers that are no plain products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import gemmsmith
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import install
from gemmsmith.ops.models import expert_layers
from gemmsmith.ops.products import norms
from tests.support.programs import data, parameters, same
from tests.unit.ops.test_layers import BF16, WIDTH, close, given, loss
from tests.unit.ops.test_programs_observed import (
    AUTOGRAD,
    VIEWS,
    _inference,
    _negated,
    _zero,
    gradients_of,
)

FEED, EXPERTS, CHOSEN = 24, 4, 2


CONFIGS = {
    Qwen3MoeExperts: Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=FEED, num_experts=EXPERTS
    ),
    GptOssExperts: GptOssConfig(
        hidden_size=WIDTH, intermediate_size=FEED, num_local_experts=EXPERTS
    ),
}


class Routed(nn.Module):
    """A layer of experts with its router's choice."""

    def __init__(self, implementation: str = "eager", kind: type = Qwen3MoeExperts) -> None:
        super().__init__()
        config: Any = CONFIGS[kind]
        config._experts_implementation = implementation
        self.experts = kind(copy.deepcopy(config))
        for one in self.experts.parameters():
            nn.init.normal_(one, std=0.3)
        self.register_buffer("index", torch.rand(2 * 3, EXPERTS).topk(CHOSEN).indices)
        self.register_buffer("shares", torch.rand(2 * 3, CHOSEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        index, shares = self.index[: len(rows)], self.shares[: len(rows)]
        out: torch.Tensor = self.experts(rows, index, shares)
        return out.view(x.shape)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "experts": Routed,
    "grouped experts": lambda: Routed("grouped_mm"),
    "gpt-oss": lambda: Routed("grouped_mm", GptOssExperts),
    "llama": lambda: LlamaRMSNorm(WIDTH),
    "gemma": lambda: GemmaRMSNorm(WIDTH),
    "torch": lambda: nn.RMSNorm(WIDTH),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    net = LAYERS[kind]()
    if not isinstance(net, Routed):
        nn.init.normal_(net.weight, 1.0, 0.2)  # type: ignore[arg-type]
    return nn.Sequential(net).to(BF16)


@pytest.fixture(autouse=True)
def here(engine: Engine, without_binding: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm with a gradient is one of ours, and so are experts with biases."""
    monkeypatch.setattr(norms, "LEAST", 0)
    monkeypatch.setattr(
        norms,
        "is_ours",
        lambda x, weight: torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad),
    )


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many layers were computed by ours since this was last called."""
    count, own_experts, own_norm = [0], expert_layers.computed, norms.RMSNorm.apply

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            count[0] += 1
            return own(*operands)

        return call

    monkeypatch.setattr(expert_layers, "computed", counted(own_experts))
    monkeypatch.setattr(norms.RMSNorm, "apply", counted(own_norm))

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    return since


@pytest.mark.parametrize("kind", LAYERS)
def test_the_patch_does_something(kind: str, ran: Callable[[], int]) -> None:
    """The other tests here would pass without."""
    net = made(kind)
    with gemmsmith.patch(net):
        net(*given(net))
    assert ran() == 1


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("act", AUTOGRAD)
@pytest.mark.parametrize("kind", LAYERS)
def test_ways_to_differentiate_and_to_observe(kind: str, act: str) -> None:
    if act == "flops of the backward pass" and kind in ("experts", "gpt-oss"):
        pytest.skip("torch counts nothing for its grouped products, which run there")
    same(made(kind), AUTOGRAD[act])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", LAYERS)
def test_operands_and_parameters_of_any_kind(kind: str, view: Any) -> None:
    def without_gradient(net: nn.Module) -> Any:
        with torch.no_grad():
            weights = {name: view(one) for name, one in parameters(net).items()}
            return torch.func.functional_call(net, weights, tuple(map(view, data(net))))

    def with_gradients(net: nn.Module) -> Any:
        weights = {name: view(one).requires_grad_() for name, one in parameters(net).items()}
        operands = [view(one).requires_grad_() for one in data(net)]
        out = torch.func.functional_call(net, weights, tuple(operands))
        return out, torch.autograd.grad(loss(out), [*operands, *weights.values()])

    same(made(kind), without_gradient)
    if view not in (_inference, _zero):
        same(made(kind), with_gradients)


@pytest.mark.parametrize("view", [_negated, _zero])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_any_kind(kind: str, view: Any) -> None:
    same(made(kind), partial(gradients_of, view))


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("kind", LAYERS)
def test_a_tangent_of_the_gradient_alone(kind: str) -> None:
    """The graph is made before the level is open; the gradient is linear in its own gradient."""
    net = made(kind)
    operands = given(net)
    with gemmsmith.patch(net):
        out = net(*operands)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out) * 2)
            (found,) = torch.autograd.grad(out, operands, dual)
            primal, tangent = forward_ad.unpack_dual(found)
    assert tangent is not None
    close([tangent], [2 * primal])


# Hooks and replaced functions


HOOKS = tuple(
    f"register{of}_{kind}"
    for of in ("", "_module")  # of the activation, and of all modules
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
)


def put_hook(register: str, net: nn.Module, seen: list[str]) -> Any:
    owner = hooks if "module" in register else net[0].experts.act_fn  # type: ignore[index]
    return getattr(owner, register)(lambda module, *_: seen.append(type(module).__name__))


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("put", HOOKS)
def test_hooks_on_parts_of_experts_are_called(ran: Callable[[], int], put: str, when: str) -> None:
    def step(net: nn.Module) -> None:
        (operand,) = given(net)
        loss(net(operand)).backward()

    calls: list[list[str]] = []
    for patched in (False, True):
        net, seen = made("experts"), []
        handle = put_hook(put, net, seen) if when == "before" or not patched else None
        if patched:
            with gemmsmith.patch(net):
                handle = put_hook(put, net, seen) if handle is None else handle
                step(net)
                assert ran() == 0
                handle.remove()
                step(net)
                assert ran() == 1
        else:
            step(net)
            handle.remove()
        calls.append(seen)
    assert calls[0] == calls[1]
    assert "SiLUActivation" in calls[0]


@pytest.fixture
def interface() -> Iterator[Any]:
    """transformers' implementations, as they were afterwards."""
    kept = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping)
    yield moe.ALL_EXPERTS_FUNCTIONS
    moe.ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    moe.ALL_EXPERTS_FUNCTIONS._global_mapping.update(kept)


REPLACED: dict[str, Callable[[pytest.MonkeyPatch, Any, Any], None]] = {
    "silu": lambda patch, net, _: patch.setattr(functional, "silu", torch.sigmoid),
    "the activation's forward": lambda patch, net, _: patch.setattr(
        SiLUActivation, "forward", lambda self, x: x
    ),
    "the activation": lambda patch, net, _: setattr(net.experts, "act_fn", nn.Tanh()),
    "the activation's own forward": lambda patch, net, _: setattr(
        net.experts.act_fn, "forward", torch.tanh
    ),
    "a subclass of the activation": lambda patch, net, _: setattr(
        net.experts, "act_fn", type("Twice", (nn.SiLU,), {"forward": lambda self, x: 2 * x})()
    ),
    "the gate": lambda patch, net, _: patch.setattr(
        Qwen3MoeExperts, "_apply_gate", lambda self, both: both.chunk(2, -1)[0]
    ),
    "the module's gate": lambda patch, net, _: setattr(
        net.experts, "_apply_gate", lambda both: both.chunk(2, -1)[1]
    ),
    "an implementation": lambda patch, net, interface: interface.register(
        "grouped_mm", lambda module, x, *_: x * 3
    ),
    "the experts' forward": lambda patch, net, _: setattr(
        net.experts, "forward", lambda x, *_: x * 2
    ),
}


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("name", REPLACED)
def test_replaced_parts_of_experts_are_called(
    interface: Any, monkeypatch: pytest.MonkeyPatch, ran: Callable[[], int], name: str, when: str
) -> None:
    net = made("grouped experts")
    (operand,) = data(net)
    plain = net(operand)
    changed = copy.deepcopy(net)
    if when == "before":
        REPLACED[name](monkeypatch, changed[0], interface)
        with gemmsmith.patch(changed):
            found = changed(operand)
    else:
        with gemmsmith.patch(changed):
            changed(operand)
            REPLACED[name](monkeypatch, changed[0], interface)
            ran()
            found = changed(operand)
    assert ran() == 0
    assert torch.equal(found, changed(operand))
    assert not torch.allclose(found, plain, atol=1e-2)


def test_experts_of_odd_widths_are_as_without_the_patch(ran: Callable[[], int]) -> None:
    for width, feed in ((20, 24), (16, 12), (15, 7)):
        config = Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=feed, num_experts=EXPERTS)
        config._experts_implementation = "eager"
        net = Qwen3MoeExperts(config).to(BF16)
        for one in net.parameters():
            nn.init.normal_(one, std=0.3)
        x, index = torch.randn(6, width).to(BF16), torch.rand(6, EXPERTS).topk(CHOSEN).indices
        operands = (x, index, torch.rand(6, CHOSEN).to(BF16))
        expected = net(*operands)
        with gemmsmith.patch(net):
            assert torch.equal(net(*operands), expected)
        assert ran() == 0


@pytest.mark.filterwarnings("ignore:gemmsmith.patch.. replaces nothing")
@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_checkpointed_layer_is_recomputed_as_it_was_computed(
    engine: Engine, kind: str, patched: bool
) -> None:
    """Though winners come, or go with the patch, before its backward pass."""
    net = made(kind)
    (operand,) = given(net)
    expected = torch.autograd.grad(loss(net(operand)), [operand, *net.parameters()])
    if not patched:
        install(None)
    with gemmsmith.patch(net):
        out = checkpoint(net, operand, use_reentrant=False)
    install(None if patched else engine)
    with gemmsmith.patch(net) if not patched else nullcontext():
        close(list(torch.autograd.grad(loss(out), [operand, *net.parameters()])), list(expected))


@pytest.mark.parametrize("kind", ["experts", "grouped experts"])
def test_compiled_experts_are_ours(kind: str) -> None:
    net = made(kind)
    (operand,) = given(net)
    expected = torch.autograd.grad(loss(net(operand)), [operand, *net.parameters()])
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    with gemmsmith.patch(net):
        out = compiled(operand)
        close(list(torch.autograd.grad(loss(out), [operand, *net.parameters()])), list(expected))
    assert [one for one in operators if "gemmsmith" in one] == [
        "gemmsmith.experts.default", "gemmsmith.experts_backward.default",
    ]  # fmt: skip
