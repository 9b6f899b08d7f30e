"""Functions and forwards that a program has replaced are called in a patched model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as models name it
from torch import nn

import gemmsmith
from gemmsmith.core.epilogue import Epilogue
from gemmsmith.ops.engine.engine import Engine
from tests.support.programs import data
from tests.support.stand_in import Chooser
from tests.unit.ops.test_layers import BF16, INNER, LAYERS, WIDTH, close


class ModuleMlp(nn.Module):
    """Whose activation is a module."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, INNER), activation, nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.act(self.up(x)))


def _scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def replacement(*arguments: Any, **named: Any) -> torch.Tensor:
        return function(*arguments, **named) * 3

    replacement.__name__ = function.__name__  # in disguise
    return replacement


REPLACED: list[tuple[Any, str, Callable[[], nn.Module]]] = [
    (F, "gelu", lambda: LAYERS["nanogpt"][0]()),
    (F, "silu", lambda: LAYERS["torchtitan"][0]()),
    (F, "relu", lambda: LAYERS["squares"][0]()),
    (torch.Tensor, "square", lambda: LAYERS["squares"][0]()),
    (torch.Tensor, "chunk", lambda: LAYERS["halves"][0]()),
    (F, "gelu", lambda: ModuleMlp(nn.GELU())),
    (F, "silu", lambda: ModuleMlp(nn.SiLU())),
    (F, "linear", lambda: LAYERS["nanogpt"][0]()),
    (F, "dropout", lambda: LAYERS["dropping"][0]()),
    (nn.GELU, "forward", lambda: ModuleMlp(nn.GELU())),
    (nn.SiLU, "forward", lambda: ModuleMlp(nn.SiLU())),
    (nn.Linear, "forward", lambda: LAYERS["nanogpt"][0]()),
    (nn.Linear, "__call__", lambda: LAYERS["nanogpt"][0]()),
    (nn.Module, "__call__", lambda: LAYERS["nanogpt"][0]()),
    (nn.Dropout, "forward", lambda: LAYERS["dropping"][0]()),
    (nn.Sequential, "forward", lambda: LAYERS["sequence"][0]()),
    (LAYERS["nanogpt"][0], "forward", lambda: LAYERS["nanogpt"][0]()),
]


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize(("owner", "name", "make"), REPLACED)
def test_functions_that_a_program_replaced(
    engine: Engine, owner: Any, name: str, make: Callable[[], nn.Module], when: str
) -> None:
    torch.manual_seed(3)
    net = make().to(BF16).eval()
    operands = data(net)
    with pytest.MonkeyPatch.context() as program, torch.no_grad():
        own = net(*operands)

        def replace() -> None:
            function = getattr(owner, name)
            replacement = _scaled(function)
            if name == "chunk":  # gives a pair

                def replacement(*arguments: Any, **named: Any) -> Any:
                    return [one * 3 for one in function(*arguments, **named)]

            program.setattr(owner, name, replacement, raising=False)

        if when == "before":
            replace()
            expected = net(*operands)
            with gemmsmith.patch(net):
                result = net(*operands)
        else:
            with gemmsmith.patch(net):
                net(*operands)
                replace()
                result = net(*operands)
            expected = net(*operands)
    close([result], [expected])
    assert not torch.allclose(own, expected, atol=1e-2)
    with gemmsmith.patch(net), torch.no_grad():
        close([net(*operands)], [own])  # and back


def test_an_activation_that_changes(engine: Engine, chooser: Chooser) -> None:
    net = ModuleMlp(nn.GELU()).to(BF16)
    x = data(net)[0]
    with torch.no_grad(), gemmsmith.patch(net):
        net(x)
        asked = {problem.operation.epilogue for problem in chooser.asked}
        assert Epilogue.BIAS_GELU_TANH not in asked
        net.act.approximate = "tanh"  # type: ignore[union-attr]
        chooser.asked.clear()
        net(x)
        asked = {problem.operation.epilogue for problem in chooser.asked}
        assert Epilogue.BIAS_GELU not in asked
