"""Engines that run stand-in kernels through the compiled binding, and operands for them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gemmsmith.answers.snapshot import Row
from gemmsmith.core.config import Use
from gemmsmith.core.problem import Problem
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.planning import Chooser as Chooses
from tests.support.stand_in import Chooser, Host, Packs, installed

BF16 = torch.bfloat16


def of_types(*dtypes: str, weights: Iterable[tuple[int, int]] = ((8, 8),)) -> Chooser:
    """A chooser whose winners have these types. It lists those of layers with these weights."""
    rows = [
        Row(problem=Problem(m=8, n=n, k=k, dtype=dtype), use=Use.CUTLASS)
        for dtype in dtypes
        for n, k in weights
    ]

    class Pinned(Chooser):
        pinned = True
        snapshot = SimpleNamespace(rows=rows)

    return Pinned(answers=lambda problem: problem.dtype in dtypes)


def only_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a test of torch's operators, as where the binding cannot be loaded."""
    monkeypatch.setattr(Dispatch, "of", lambda kind: None)
    leave(left=True)


def leave(*, left: bool) -> None:
    """`Dispatch.leave` of the binding that this process has, if it has any."""
    for dispatch in Dispatch._made.values():
        if dispatch is not None:
            dispatch.leave(left=left)


@contextmanager
def made(chooser: Chooses, pack: Path, numerics: str | None = None) -> Iterator[Engine]:
    """Installs an engine on the host during the block; the binding works with it."""
    host = Host()
    host.kind = "cpu"
    engine = Engine(chooser, Packs(pack), platform=host, numerics=numerics)
    with installed(engine):
        yield engine
    torch._dynamo.reset()


def operands(*sizes: tuple[int, ...], grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(size).to(BF16).requires_grad_(grad) for size in sizes]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


class Swapping(Chooser):
    """A lookup that switches to newer winners."""

    snapshot: object = 1
    on_swap: Callable[[], None] = staticmethod(lambda: None)


def layers(*widths: int, bias: bool = False) -> nn.Sequential:
    made = [nn.Linear(k, n, bias=bias) for k, n in itertools.pairwise(widths)]
    return nn.Sequential(*made).to(BF16)


def trains(model: nn.Module, width: int, call: Callable[..., torch.Tensor] | None = None) -> None:
    """Compares the output and all gradients of a step on three-dimensional input with FP32."""
    (x,) = operands((2, 4, width), grad=True)
    out = (call or model)(x)
    out.backward(torch.ones_like(out))
    wide = copy.deepcopy(model).float()
    wide.zero_grad()
    wide_x = x.detach().float().requires_grad_()
    expected = wide(wide_x)
    expected.backward(torch.ones_like(expected))
    close(out, expected)
    for ours, theirs in zip((x, *model.parameters()), (wide_x, *wide.parameters()), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=3e-2, atol=1e-1)
    model.zero_grad()
