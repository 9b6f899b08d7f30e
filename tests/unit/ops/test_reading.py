"""Forwards that are understood, and those that must not be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from torch import nn

from gemmsmith.core.epilogue import Activation
from gemmsmith.ops.models import recipes
from gemmsmith.ops.models.reading import (
    Activated,
    Called,
    Combined,
    Expression,
    Half,
    parsed,
    read,
)


class Known:
    """Forwards, each by its name."""

    def gated(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def halved(self, x):
        """Docstrings are no statements."""
        up = self.w13(x)
        gate, up = torch.chunk(up, 2, dim=-1)
        return self.w2(up * F.gelu(gate, approximate="tanh"))

    def indexed(self, x):
        both = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(both[0]) * both[1])

    def squared(self, x):
        x = self.w1(x)
        x = F.relu(x).square()
        return self.w2(x)

    def added(self, x, y):
        return self.norm(self.w1(x) + y)


class Unknown:
    """Each has something that none of ours would do."""

    def third_part(self, x):
        both = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(both[0]) * both[-1])

    def row(self, x):
        return self.w2(F.silu(self.w1(x)[0]))

    def branch(self, x):
        if self.training:
            x = x + 1
        return self.w2(F.silu(self.w1(x)))

    def drops_a_result(self, x):
        self.w3(x)
        return self.w2(F.silu(self.w1(x)))

    def drops_an_assigned_result(self, x):
        y = self.w3(x)
        y = F.silu(self.w1(x))
        return self.w2(y)

    def default(self, x, scale=1.0):
        return self.w2(F.silu(self.w1(x)))

    def other_names(self, x, **kwargs):
        return self.w2(F.silu(self.w1(x)))

    def number(self, x):
        return self.w2(F.silu(self.w1(x)) * 0.5)

    def other_function(self, x):
        return self.w2(torch.tanh(self.w1(x)))

    def other_halves(self, x):
        gate, up = self.w13(x).chunk(2, dim=0)
        return self.w2(F.silu(gate) * up)

    def attribute(self, x):
        return self.w2(F.silu(self.w1(x)) + self.bias)

    def of_a_variable(self, x):
        return self.w2(F.gelu(self.w1(x), approximate=self.kind))

    def two_arguments(self, x):
        return self.w2(F.silu(self.w1(x, x)))

    def nothing(self, x):
        self.w1(x)

    @torch.no_grad()
    def decorated(self, x):
        return self.w2(F.silu(self.w1(x)))

    @functools.wraps(Known.gated)
    def disguised(self, x):
        return self.w2(F.silu(self.w1(x)) * 0)


def computed(function: Callable[..., Any]) -> Expression | None:
    formula = read(function)
    return None if formula is None else formula.expression


def test_what_is_understood() -> None:
    gated = computed(Known.gated)
    assert isinstance(gated, Called)
    assert gated.child == "w2"
    product = gated.argument
    assert isinstance(product, Combined)
    assert product.is_product
    assert isinstance(product.left, Activated)
    assert product.left.activation is Activation.SILU
    halved = computed(Known.halved)
    assert isinstance(halved, Called)
    assert isinstance(halved.argument, Combined)
    up, gate = halved.argument.left, halved.argument.right
    indexed = computed(Known.indexed)
    assert isinstance(indexed, Called)
    assert isinstance(indexed.argument, Combined)
    first, second = indexed.argument.left, indexed.argument.right
    assert isinstance(first, Activated)
    assert isinstance(first.argument, Half)
    assert isinstance(second, Half)
    assert (first.argument.second, second.second) == (False, True)
    assert first.argument.of is second.of
    assert isinstance(up, Half)
    assert up.second
    assert isinstance(gate, Activated)
    assert gate.activation is Activation.GELU_TANH
    squared = computed(Known.squared)
    assert isinstance(squared, Called)
    assert isinstance(squared.argument, Activated)
    assert squared.argument.activation is Activation.RELU2
    added = computed(Known.added)
    assert isinstance(added, Called)
    assert isinstance(added.argument, Combined)
    assert not added.argument.is_product


@pytest.mark.parametrize("name", [name for name in vars(Unknown) if not name.startswith("_")])
def test_what_is_not(name: str) -> None:
    assert read(getattr(Unknown, name)) is None


def test_the_source_must_be_that_of_the_code() -> None:
    def like(function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
        made = type(function)(function.__code__.replace(**changes), function.__globals__)
        made.__name__ = function.__name__
        return made

    assert read(like(Known.gated)) is not None
    # Compiled from the same lines when they said something else.
    assert read(like(Known.gated, co_names=("w2", "F", "silu", "w3", "w1"))) is None
    assert read(eval("lambda self, x: self.w2(x)")) is None


def test_jumps_over_calls_of_a_module() -> None:
    """The whole file's compiler loads a module's function by another, longer instruction."""
    assert parsed(branching) is not None


def branching(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = torch.relu(x) if count > 2 else torch.sigmoid(x)
    return x


class Layers(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act = activation

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.act(self.up(x)))


class Other(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * 2


class Quantized(nn.Linear):
    pass


def test_what_a_layer_must_be_made_of() -> None:
    def known(net: nn.Module) -> str:
        return str(recipes.recipe_of(net))

    assert known(Layers(nn.GELU())) == "linear + gelu"
    assert known(Layers(nn.GELU(approximate="tanh"))) == "linear + gelu_tanh"
    assert known(Layers(F.silu)) == "linear + silu"
    assert known(Layers(nn.Tanh())) == "None"
    assert known(Other(nn.GELU())) == "None"
    net = Layers(nn.GELU())
    net.up = Quantized(8, 16)
    assert known(net) == "None"
    net = Layers(nn.GELU())
    net.forward = lambda x: x  # type: ignore[method-assign]
    assert known(net) == "None"
    net = Layers(nn.GELU())
    net.up.weight = nn.Parameter(net.up.weight.double())
    assert known(net) == "linear + gelu"  # types are asked at every call
