"""Which calls of products are noted: all that run, in all threads, and nothing else."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._guards import CompileContext, CompileId, compile_context

import gemmsmith
from gemmsmith.ops import capturing
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.program import calls
from gemmsmith.program.calls import Calls
from tests.support.observable import net, operand, product, step
from tests.support.stand_in import Chooser
from tests.unit.ops.test_layers import given, loss, made


@pytest.mark.parametrize("how", [{}, {"dynamic": True}, {"backend": "eager"}], ids=str)
def test_compiled_products_count_as_eager_ones(how: dict[str, Any]) -> None:
    """Those that a compiler traces do not."""
    torch._dynamo.reset()
    model = net()
    run = torch.compile(model, **({"backend": "aot_eager", "fullgraph": True} | how))
    with gemmsmith.capture() as expected:
        for rows in (4, 5, 6, 4):
            step(model, operand(rows, 16))
    with gemmsmith.capture() as found:
        for rows in (4, 5, 6, 4):
            step(run, operand(rows, 16))
    assert found.problems == expected.problems
    assert found.problems.total() == 24


def test_what_a_compiler_times_does_not_count() -> None:
    with gemmsmith.capture() as shapes, compile_context(CompileContext(None)):
        product(operand(8, 8))
        with compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))):
            product(operand(8, 8))
    assert shapes.problems.total() == 2


def test_all_operators_that_are_seen_are_read() -> None:
    names = {f"aten::{name}" for name in calls.ATEN} | {
        f"gemmsmith::{name}" for name in (*calls.OWN, *calls.FUSED)
    }
    there = {
        name
        for name in names
        if hasattr(getattr(torch.ops, name[:-2].split("::")[0]), name.split("::")[1])
    }
    read = {str(one) for one in (*capturing._PRODUCTS, *capturing._LAYERS)}
    assert {one.replace(".", "::") for one in read} == there


def test_blocks_may_be_nested_and_overlap() -> None:
    with gemmsmith.capture() as outer:
        product(operand(8, 8))
        with gemmsmith.capture() as inner:
            product(operand(8, 8))
            assert (outer.problems.total(), inner.problems.total()) == (4, 2)
        product(operand(8, 8))
    product(operand(8, 8))
    assert (outer.problems.total(), inner.problems.total()) == (6, 2)


def test_all_threads_count_and_none_is_disturbed_by_the_end() -> None:
    """torch takes a kernel away although another thread is about to run it."""
    running, errors = threading.Event(), []

    def work() -> None:
        a = operand(4, 4)
        while not running.is_set():
            try:
                torch.mm(a, a)
            except Exception as error:  # noqa: BLE001
                errors.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with gemmsmith.capture() as shapes:
            while not shapes.calls.total and not errors:
                pass
    running.set()
    for thread in threads:
        thread.join()
    assert errors == []
    with gemmsmith.capture():  # now they are gone
        pass
    assert not calls._Hooks.libraries


def test_what_cannot_be_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    a = operand(4, 4, dtype=torch.float32)
    with gemmsmith.capture() as shapes:
        torch.addmm(a, a.to_sparse(), a)
        monkeypatch.setattr(Calls, "_note", lambda *_: 1 / 0)
        torch.mm(a, a)
    assert shapes.unseen == {
        "aten.addmm.default of sparse or nested tensors": 1,
        "aten.mm.default: ZeroDivisionError": 1,
    }


def test_another_librarys_function_at_the_same_place_stays() -> None:
    ran = []
    library = torch.library.Library("aten", "IMPL", "BackendSelect")
    try:

        def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ran.append(a.shape)
            found: torch.Tensor = torch.ops.aten.mm.default.redispatch(keys & calls._BELOW, a, b)
            return found

        library.impl("mm", mm, with_keyset=True)
        with gemmsmith.capture() as shapes:
            product(operand(8, 8))
        assert len(ran) == 2
        assert shapes.unseen == {"aten::mm, which another library replaces": 1}
        product(operand(8, 8))
        assert len(ran) == 4
    finally:
        library._destroy()


def test_what_compilers_hide_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        SimpleNamespace(triton_tem_fused_mm_0=1, triton_poi_fused_add_1=1),
        SimpleNamespace(triton_tem_fused_mm_0=1, triton_tem_fused_flex_2=1),
        SimpleNamespace(cpp_wrapper_src=""),
    ]
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=made))
    assert calls.compiled() == Counter() or "torch._inductor.codecache" in sys.modules
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
    monkeypatch.setitem(sys.modules, "torch._inductor.package.package", cache)
    assert sorted(calls.compiled().values()) == [1, 1, 2]
    assert any("triton_tem_fused_flex_2" in one for one in calls.compiled())


@pytest.mark.parametrize("wins", [True, False])
def test_fused_products_of_compiled_graphs_are_noted(
    engine: Engine, chooser: Chooser, wins: bool
) -> None:
    """Those that kernels run; else the plain ones that torch runs."""
    chooser.answers = lambda problem: wins and problem.operation.is_fused
    torch._dynamo.reset()
    net = made("nanogpt")
    with gemmsmith.patch(net):
        run = torch.compile(net, backend="aot_eager", fullgraph=True)
        with gemmsmith.capture() as shapes:
            loss(run(*given(net))).backward()
    kinds = Counter(str(one.operation.epilogue) for one in shapes.problems.elements())
    if wins:
        assert kinds["bias_gelu_aux"] == kinds["dgelu_bgrad"] == 1
    else:
        if torch.__version__ < "2.12":  # they are noted while the graph is traced, too
            del kinds["bias_gelu_aux"]
        assert kinds == {"none": 4, "bias": 2}
