"""`numerics="invariant"` of a patch: from when until when, and for whose products it holds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemmsmith
from gemmsmith.core.problem import Problem
from gemmsmith.errors import NotInvariant
from gemmsmith.ops import autouse
from gemmsmith.ops.below.compiling import OPTIONS
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.engine.in_use import in_use, install
from gemmsmith.ops.models.patching import _Patches
from tests.gpu.support.choosing import Ground
from tests.support import stand_in, unchanged
from tests.support.below import close, layers, made, operands
from tests.support.stand_in import Chooser, Packs, installed
from tests.unit.ops.test_unchanged import baked

pytestmark = pytest.mark.usefixtures("no_other_patch")

Runs = Callable[[], int]

OTHERS = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "cpp_wrapper": True}


@pytest.fixture
def chooser() -> Chooser:
    return Chooser(answers=lambda problem: not problem.operation.is_fused)


@pytest.fixture
def engine(chooser: Chooser, pack: Path, binding: Dispatch) -> Iterator[Engine]:
    with made(chooser, pack) as engine:
        yield engine


def orders(chooser: Chooser, act: Callable[[], object]) -> set[str | None]:
    """The orders that products of `act` demand, of a size that was not known before."""
    chooser.asked.clear()
    act()
    return {problem.operation.summation for problem in chooser.asked}


def of_new_size() -> None:
    """A product of a number of tokens that no other has."""
    x, w = operands((next(_tokens), 16), (8, 16))
    functional.linear(x, w)


_tokens = iter(range(100, 10_000))


def test_the_demand_lasts_as_long_as_its_patch(engine: Engine, chooser: Chooser) -> None:
    with gemmsmith.patch():
        assert orders(chooser, of_new_size) == {None}
        with gemmsmith.patch(numerics="invariant"):
            assert orders(chooser, of_new_size) == {"sequential"}
            with gemmsmith.patch():
                assert orders(chooser, of_new_size) == {"sequential"}
        assert orders(chooser, of_new_size) == {None}
    model = layers(16, 8)
    gemmsmith.patch(model, numerics="invariant")
    assert orders(chooser, lambda: model(operands((3, 16))[0])) == {"sequential"}
    gemmsmith.unpatch(model)
    assert orders(chooser, of_new_size) == set()
    assert in_use() is engine


def test_patches_end_in_any_order(engine: Engine, chooser: Chooser) -> None:
    first, second = (gemmsmith.patch(numerics="invariant") for _ in range(2))
    plain = gemmsmith.patch()
    first.close()
    assert orders(chooser, of_new_size) == {"sequential"}
    second.close()
    assert orders(chooser, of_new_size) == {None}
    plain.close()


def test_the_demand_holds_in_every_thread(engine: Engine, chooser: Chooser) -> None:
    def in_thread() -> None:
        thread = threading.Thread(target=of_new_size)
        thread.start()
        thread.join()

    with gemmsmith.patch(numerics="invariant"):
        assert orders(chooser, in_thread) == {"sequential"}


def test_decisions_are_kept_from_step_to_step(engine: Engine, chooser: Chooser) -> None:
    x, w = operands((4, 16), (8, 16))
    for step in range(3):
        chooser.asked.clear()
        with gemmsmith.patch(numerics="invariant"):
            functional.linear(x, w)
        assert bool(chooser.asked) == (step == 0)


def test_another_word_is_an_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match="numerics must be one of invariant, got"):
        gemmsmith.patch(numerics="exact")
    assert not _Patches.open


def test_a_demand_needs_winners(pack: Path) -> None:
    with installed(None):
        with pytest.raises(NotInvariant, match="needs winners: "):
            gemmsmith.patch(numerics="invariant")
        assert not _Patches.open
        gemmsmith.patch(report=True).close()


def test_winners_stay_while_they_are_demanded(engine: Engine) -> None:
    with gemmsmith.patch(numerics="invariant"):
        with pytest.raises(NotInvariant, match="undo its patch first"):
            gemmsmith.use(None)
        assert in_use() is engine.invariant
    before = install(engine)
    gemmsmith.use(None)
    install(before)


def test_other_winners_run_in_order_too(engine: Engine, chooser: Chooser, pack: Path) -> None:
    others = Chooser(answers=chooser.answers)
    with gemmsmith.patch(numerics="invariant"):
        before = install(Engine(others, Packs(pack), platform=engine.platform))
        assert before is engine
        assert orders(others, of_new_size) == {"sequential"}
        install(before)


def test_a_demand_needs_the_binding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatch, "of", lambda kind: None)
    for outer in (False, True):
        if outer:
            gemmsmith.patch()
        with pytest.raises(NotInvariant, match="compiled binding"):
            gemmsmith.patch(numerics="invariant")
        assert in_use() is engine
    gemmsmith.unpatch()


def test_a_region_is_computed_again_as_at_first(engine: Engine, chooser: Chooser) -> None:
    """Also if the patch has ended before the backward pass."""
    asked: list[Problem] = []
    x, w = operands((4, 16), (8, 16), grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        asked.clear()
        chooser.asked.clear()
        with_order = gemmsmith.linear(x, w)
        asked.extend(chooser.asked)
        return with_order.relu()

    with gemmsmith.patch(numerics="invariant"):
        out = checkpoint(region, x, use_reentrant=False)
        assert {problem.operation.summation for problem in asked} == {"sequential"}
    out.sum().backward()
    assert x.grad is not None
    close(x.grad, (x @ w.t() > 0).float() @ w.float())
    assert in_use() is engine


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of Inductor's import
@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}, {"options": OTHERS}])
def test_graphs_that_are_compiled_meanwhile_call_torchs_products(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    compiled_with: list[dict[str, Any]] = []

    def compile_fx(graph: Any, inputs: Any, *, config_patches: dict[str, Any], **_: Any) -> Any:
        compiled_with.append(config_patches)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    x, w = operands((4, 16), (8, 16))
    for numerics in (None, "invariant", None):
        torch._dynamo.reset()
        with gemmsmith.patch(numerics=numerics):
            close(torch.compile(functional.linear, **options)(x, w), x.float() @ w.float().t())
    before, meanwhile, after = compiled_with
    assert before == after
    assert meanwhile == {**before, **OPTIONS}


@pytest.fixture
def started(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(autouse, "Engine", stand_in.ENGINE)
    monkeypatch.setattr("gemmsmith.ops.engine.source.local_model", lambda: None)
    before = in_use()
    yield
    autouse._State.running.close()
    autouse._State.demand.close()
    install(before)


def test_the_environment_opens_such_a_patch(ground: Ground, started: None, tmp_path: Path) -> None:
    problem = Problem(m=32, n=48, k=16, dtype="bf16.sum_sequential")
    bundle = str(baked(ground, tmp_path / "winners.gspack", [problem]))
    for numerics in (None, "invariant"):
        autouse.start(bundle, numerics)
        engine = in_use()
        assert engine is not None
        assert engine.is_invariant == (numerics is not None)
    gemmsmith.use(bundle)  # the program's own winners
    engine = in_use()
    assert engine is not None
    assert engine.is_invariant
    with pytest.raises(NotInvariant):
        gemmsmith.use(None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"GEMMSMITH_NUMERICS": "exact"}, "GEMMSMITH_NUMERICS must be one of invariant, got"),
        ({"GEMMSMITH_NUMERICS": "invariant"}, "needs winners: set GEMMSMITH as well"),
        (
            {"GEMMSMITH_NUMERICS": "invariant", "GEMMSMITH": "none.gspack"},
            "GEMMSMITH_NUMERICS needs GEMMSMITH=none.gspack: it must be a service's URL",
        ),
        ({"GEMMSMITH_NUMERICS": "invariant", "GEMMSMITH": "off"}, None),
        ({"GEMMSMITH_NUMERICS": " "}, None),
    ],
)
def test_a_program_that_cannot_run_in_order_ends(
    tmp_path: Path, variables: dict[str, str], error: str | None
) -> None:
    environment = unchanged.environment(tmp_path / "site", **variables)
    done = unchanged.run([sys.executable, "-c", "import torch; print(1)"], tmp_path, environment)
    assert done.returncode == (0 if error is None else 1)
    assert done.stdout == ("1\n" if error is None else "")
    assert (error or "") in done.stderr
    assert (error is None) == (done.stderr == "")
