"""What layers could fuse, by the sizes of their products alone, is what patched layers note."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.ops.models.foreseen import Foreseen
from tests.unit.ops.test_layers import INNER, LAYERS, WIDTH, FeedForward, Mlp, Output

BF16 = torch.bfloat16


def fused(problems: Counter[Problem]) -> dict[Problem, int]:
    plain = ("bias", "none")
    return {
        one: count
        for one, count in problems.items()
        if one.operation.is_fused and one.operation.epilogue not in plain
    }


def inputs(net: nn.Module) -> list[torch.Tensor]:
    count = 2 if isinstance(net, Output) else 1
    return [torch.randn(2, 3, WIDTH, dtype=BF16).requires_grad_() for _ in range(count)]


def run(net: nn.Module, *, training: bool = True) -> None:
    with torch.set_grad_enabled(training):
        out = net(*inputs(net))
        if training:
            out.float().square().sum().backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_what_a_patched_model_notes(name: str, training: bool) -> None:
    net = LAYERS[name][0]().to(BF16)
    with gemmsmith.capture() as shapes, gemmsmith.patch(net):
        run(net, training=training)
    patched = shapes.problems
    with gemmsmith.capture() as shapes:
        run(net, training=training)
    plain = shapes.problems
    assert fused(plain) == {}
    foreseen = Foreseen()
    foreseen.look(net.modules())
    assert foreseen.problems(plain) == fused(patched) != {}


def test_layers_of_one_size_share_the_calls() -> None:
    net = nn.ModuleList(
        [*(Mlp() for _ in range(3)), nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)]
    )
    foreseen = Foreseen()
    foreseen.look(net.modules())
    ran = Counter({Problem(m=8, n=INNER, k=WIDTH, dtype="bf16.then_bias"): 500})
    assert foreseen.problems(ran) == {
        Problem(m=8, n=INNER, k=WIDTH, dtype="bf16.then_bias_gelu"): 300
    }


def test_what_was_seen_lasts_and_what_changed_is_seen_anew() -> None:
    ran = Counter({Problem(m=8, n=INNER, k=WIDTH): 6})
    gated = Counter({Problem(m=8, n=2 * INNER, k=WIDTH, dtype="bf16.then_silu_gate"): 3})
    foreseen, net = Foreseen(), FeedForward()
    foreseen.look(net.modules())
    foreseen.look([])
    assert foreseen.problems(ran) == gated
    net.w3 = nn.Sequential(net.w3)  # as adapters do
    foreseen.look(net.modules())
    assert foreseen.problems(ran) == {}


class Gpt2(nn.Module):
    """With transformers' transposed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(INNER, WIDTH), Conv1D(WIDTH, INNER)
        self.act = nn.GELU("tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


def test_transposed_weights() -> None:
    net = Gpt2().to(BF16)
    with gemmsmith.capture() as shapes:
        run(net)
    foreseen = Foreseen()
    foreseen.look(net.modules())
    assert foreseen.problems(shapes.problems) == {
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_bias_gelu_tanh_aux", layout="tt"): 1,
        Problem(m=6, n=INNER, k=WIDTH, dtype="bf16.then_dgelu_tanh_bgrad", layout="tn"): 1,
    }


class Odd(nn.Module):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_modules_that_raise_are_passed_by() -> None:
    net, foreseen = FeedForward(), Foreseen()
    foreseen.look([Odd(), *net.modules(), Odd()])
    assert foreseen.problems(Counter({Problem(m=8, n=INNER, k=WIDTH): 2})) != {}
