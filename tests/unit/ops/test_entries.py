"""Compiled callers of operators that Python overrides: decided once, they never enter Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import functional

import gemmsmith
from gemmsmith.ops.below import dispatch as dispatches
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from tests.support.below import BF16, close, layers, leave, made, operands
from tests.support.stand_in import Chooser

Runs = Callable[[], int]

ENDS = torch.tensor([5, 5, 17, 20], dtype=torch.int32)


@pytest.fixture
def engine(chooser: Chooser, pack: Any, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack) as engine:
        yield engine


def entered(call: Callable[[], object]) -> set[str]:
    """Our functions in Python that a call enters, but for the stand-in of CUDA's stream."""
    names = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "gemmsmith" in frame.f_globals.get("__name__", ""):
            names.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names - {"_stream_of.<locals>.give"}


def biased(rows: int = 4) -> Callable[[], torch.Tensor]:
    x, w, bias = operands((rows, 16), (8, 16), (8,), grad=True)

    def call() -> torch.Tensor:
        out = functional.linear(x, w, bias)
        out.sum().backward()
        return out

    return call


def into() -> Callable[[], torch.Tensor]:
    bias, a, b = operands((8,), (4, 16), (16, 8))
    out = torch.empty(4, 8, dtype=BF16)
    return lambda: torch.addmm(bias, a, b, out=out)


def grouped() -> Callable[[], torch.Tensor]:
    x, w = operands((20, 16), (4, 24, 16), grad=True)

    def call() -> torch.Tensor:
        out = torch._grouped_mm(x, w.mT, offs=ENDS)
        out.backward(torch.ones_like(out))
        return out

    return call


def batched() -> Callable[[], torch.Tensor]:
    a, b = operands((3, 4, 16), (3, 16, 8))
    return lambda: torch.bmm(a, b)


CALLS = {
    "plain": lambda: partial(torch.mm, *operands((4, 16), (16, 8))),
    "batch": batched,
    "bias": biased,
    "bias, into a tensor": into,
    "experts": grouped,
}


@pytest.mark.parametrize("wins", [True, False])
@pytest.mark.parametrize("kind", CALLS)
def test_a_decided_product_enters_no_python(
    engine: Engine, chooser: Chooser, runs: Runs, kind: str, wins: bool
) -> None:
    call = CALLS[kind]()
    expected = call().clone()
    chooser.answers = lambda _: wins
    with gemmsmith.patch():
        assert entered(call)  # decides
        runs()
        assert entered(call) == set()
        assert (runs() > 0) == wins
        close(call(), expected)


def test_sizes_without_a_winner_enter_no_python(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    """A layer whose weight has winners for more rows alone."""
    chooser.answers = lambda problem: problem.m >= 64
    model = layers(16, 8, bias=True)
    few, many = operands((4, 16), (64, 16))
    with gemmsmith.patch(model), torch.no_grad():
        for x in (few, many):
            model(x)
        assert runs() == 1
        for x, expected in ((few, 0), (many, 1)):
            assert entered(lambda x=x: model(x)) == set()  # type: ignore[misc]
            assert runs() == expected


@pytest.mark.parametrize("kind", CALLS)
def test_overrides_compute_the_same(
    engine: Engine, binding: Dispatch, runs: Runs, kind: str
) -> None:
    """They do where this torch's kernels are not known: by the shim, or in Python."""
    call = CALLS[kind]()
    with gemmsmith.patch():
        expected, count = call().clone(), runs()
        binding.leave()
        assert torch.equal(call(), expected)
        assert runs() == count
        assert bool(entered(call)) == (kind not in ("plain", "batch"))
        assert torch.empty(0, 4).mm(torch.empty(4, 0)).stride() == (1, 1)
        leave(left=False)
        assert entered(call) == set()


ROWS = torch.empty(1, 16, dtype=BF16).expand(1 << 22, 16)
WRONG: dict[str, Callable[[], torch.Tensor]] = {
    "sizes": lambda: torch.mm(torch.ones(4, 16), torch.ones(8, 16)),
    "types": lambda: torch.mm(torch.ones(4, 16), torch.ones(16, 8, dtype=BF16)),
    "dimensions": lambda: torch.mm(torch.ones(4, 16), torch.ones(2, 16, 8)),
    "batches": lambda: torch.bmm(torch.ones(3, 4, 16), torch.ones(2, 16, 8)),
    "type of the output": lambda: torch.mm(
        torch.ones(4, 16), torch.ones(16, 8), out=torch.ones(4, 8, dtype=torch.int32)
    ),
    "bias": lambda: torch.addmm(torch.ones(7), torch.ones(4, 16), torch.ones(16, 8)),
    "memory": lambda: torch.mm(ROWS, ROWS.t()),
}


@pytest.mark.parametrize("kind", WRONG)
def test_errors_are_torchs_own(engine: Engine, kind: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        WRONG[kind]()
    with gemmsmith.patch(), pytest.raises(RuntimeError) as raised:
        WRONG[kind]()
    assert (raised.type, str(raised.value)) == (expected.type, str(expected.value))


def test_other_callers_enter_python(engine: Engine, runs: Runs) -> None:
    bias, a, b = operands((8,), (4, 16), (16, 8))
    with gemmsmith.patch(), torch._C._AutoDispatchBelowAutograd():
        close(torch.ops.aten.addmm(bias, a, b), bias.float() + a.float() @ b.float())
    assert runs() == 1


def test_a_report_sees_grouped_products(engine: Engine, pack: Any) -> None:
    text, call = StringIO(), grouped()
    with gemmsmith.patch(report=True, file=text):
        call()
    assert "20×24×16" in text.getvalue()


def test_a_demand_of_one_order_enters_python(
    chooser: Chooser, pack: Any, binding: Dispatch
) -> None:
    call = biased()
    with made(chooser, pack), gemmsmith.patch():
        call()
        assert entered(call) == set()
    with made(chooser, pack, "invariant"), gemmsmith.patch():
        call()
        assert entered(call)


def test_another_schema_is_not_entered(
    binding: Dispatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch whose operator has other arguments: compiled callers would pass them otherwise."""
    monkeypatch.setitem(dispatches._SCHEMAS, "addmm", "aten::addmm(Tensor self) -> Tensor")
    kernel = torch.library.get_kernel("aten::addmm", "CPU")
    with caplog.at_level(logging.INFO, "gemmsmith"):
        binding.enter("addmm", kernel, kernel)
        monkeypatch.undo()
        binding.enter("addmm", kernel, kernel)  # no kernel in Python
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "addmm costs the host more"
    ] * 2
