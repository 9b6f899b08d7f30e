"""Tuned kernels below the products of one model's layers: `patch(model)`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from tests.support.below import BF16, Swapping, close, layers, made, of_types, operands, trains
from tests.support.patched import is_patched
from tests.support.stand_in import Chooser

Runs = Callable[[], int]


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack) as engine:
        yield engine


COMPILERS = [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("compiled", ["inside", "outside"])
@pytest.mark.parametrize("backend", COMPILERS)
def test_a_models_products(engine: Engine, runs: Runs, backend: str | None, compiled: str) -> None:
    model = layers(16, 24, 40)
    call: Callable[..., torch.Tensor] = model

    def compiling() -> Callable[..., torch.Tensor]:
        return torch.compile(model, backend=backend, fullgraph=True) if backend else model

    if compiled == "outside":
        call = compiling()
        trains(model, 16, call)
        assert runs() == 0
    with gemmsmith.patch(model):
        assert type(model[0]) is nn.Linear
        if compiled == "inside":
            call = compiling()
        for _ in range(2):
            trains(model, 16, call)
            assert runs() == 6
    trains(model, 16, call)
    assert runs() == 0


def test_a_compiled_graph_is_torchs_own(engine: Engine, runs: Runs) -> None:
    """So that everything is fused as ever, and kernels run by what is open when it runs."""
    model = layers(16, 24)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(torch.randn(4, 16).to(BF16))
    with gemmsmith.patch(model):
        compiled(torch.randn(4, 16).to(BF16))
        assert runs() == 1
    assert len(graphs) == 1
    assert not any("gemmsmith" in str(node.target) for node in graphs[0].graph.nodes)


def test_what_is_not_the_models_is_torchs(engine: Engine, runs: Runs, chooser: Chooser) -> None:
    model, other = layers(16, 24), layers(48, 32)
    with gemmsmith.patch(model):
        trains(other, 48)
        for a, b in (((4, 48), (48, 32)), ((3, 8, 16), (3, 16, 24)), ((8, 16), (16, 16))):
            left, right = operands(a, b)
            close(left @ right, left.float() @ right.float())
        assert runs() == 0
        assert not chooser.asked
        left, right = operands((8, 16), (16, 24))
        left @ right  # no layer's, but of a layer's sizes
        assert runs() == 1


def test_blocks_add_up_and_end(engine: Engine, runs: Runs) -> None:
    one, two = layers(16, 24), layers(48, 32)

    def count() -> tuple[int, int, int]:
        """Kernels that ran for each model and for a product of neither."""
        trains(one, 16)
        of_one = runs()
        trains(two, 48)
        of_two = runs()
        left, right = operands((4, 56), (56, 64))
        left @ right
        return of_one, of_two, runs()

    with gemmsmith.patch():
        with gemmsmith.patch(one):
            assert count() == (3, 3, 1)
        assert count() == (3, 3, 1)
    with gemmsmith.patch(one):
        with gemmsmith.patch():
            assert count() == (3, 3, 1)
        assert count() == (3, 0, 0)
        with gemmsmith.patch(two):
            assert count() == (3, 3, 0)
        with pytest.raises(KeyError), gemmsmith.patch(two):
            raise KeyError
        assert count() == (3, 0, 0)
    assert count() == (0, 0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("adds", [True, False])
def test_a_layer_with_a_bias(
    pack: Path, binding: Dispatch, runs: Runs, backend: str | None, adds: bool
) -> None:
    """Without a winner that adds the bias, a class of ours adds it to a plain kernel's product."""
    model = nn.Sequential(*layers(16, 24), *layers(24, 40, bias=True))
    call = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    sizes = [(24, 16), (40, 24)]
    chooser = of_types("bf16", *(["bf16.then_bias"] if adds else []), weights=sizes)
    with made(chooser, pack):
        with gemmsmith.patch(model):
            assert is_patched(model[1]) is not adds
            trains(model, 16, call)
            assert runs() == 6
        assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
        trains(model, 16, call)
        assert runs() == 0


def test_gradients_of_a_bias_layer_whose_forward_product_is_torchs(
    engine: Engine, chooser: Chooser, runs: Runs
) -> None:
    chooser.saving_us = None  # not known to outweigh the pass that adds the bias
    chooser.answers = lambda problem: not problem.operation.is_fused
    model = layers(16, 24, bias=True)
    with gemmsmith.patch(model):
        trains(model, 16)
    assert runs() == 2


def test_a_report_is_told_of_a_models_products(engine: Engine, runs: Runs) -> None:
    model, file = layers(16, 24), io.StringIO()
    with gemmsmith.patch(report=True, file=file), gemmsmith.patch(model):
        trains(model, 16)
    assert runs() == 3
    assert "3 of" in file.getvalue()


def test_newer_winners_reach_the_outer_block(pack: Path, binding: Dispatch, runs: Runs) -> None:
    chooser = Swapping(answers=lambda problem: False)
    model, other = layers(16, 24), layers(48, 32)
    with made(chooser, pack), gemmsmith.patch(model):
        with gemmsmith.patch(other):
            pass
        trains(model, 16)
        assert runs() == 0
        chooser.answers, chooser.snapshot = (lambda problem: True), 2
        chooser.on_swap()
        trains(model, 16)
        assert runs() == 3


def test_switching_keeps_no_more_memory(engine: Engine, binding: Dispatch, runs: Runs) -> None:
    model = layers(16, 24)
    kept = set()
    for _ in range(3):
        with gemmsmith.patch(model):
            trains(model, 16)
        kept.add(len(binding._plans))
    assert runs() == 9
    assert len(kept) == 1


def test_an_input_in_columns(engine: Engine, runs: Runs) -> None:
    """torch computes its gradient transposed."""
    model = layers(16, 24)
    x = operands((16, 8))[0].t().requires_grad_()
    with gemmsmith.patch(model):
        out = model(x)
        out.backward(torch.ones_like(out))
    assert runs() == 3
