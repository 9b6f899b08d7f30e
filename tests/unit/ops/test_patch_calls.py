"""`patch` as a plain call: it lasts until `unpatch`, whatever is patched and undone meanwhile."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gemmsmith
from gemmsmith.ops.below.dispatch import Dispatch
from gemmsmith.ops.engine.engine import Engine
from gemmsmith.ops.models import patching
from tests.support.patched import is_patched
from tests.support.stand_in import Host

BF16 = torch.bfloat16
Runs = Callable[[], int]


@pytest.fixture(autouse=True)
def _all_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patching._Patches, "warned", False)
    monkeypatch.setattr(patching._Patches, "open", [])  # other tests' blocks
    yield
    gemmsmith.unpatch()
    assert patching._Patches.open == []


def layer() -> nn.Linear:
    return nn.Linear(16, 24, dtype=BF16)


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 64, dtype=BF16).view(4, 16)


def test_a_model_until_unpatch(engine: Engine, runs: Runs) -> None:
    net = layer()
    gemmsmith.patch(net)
    net(x())
    assert runs() == 1
    gemmsmith.unpatch(layer())  # another
    net(x())
    assert runs() == 1
    gemmsmith.unpatch(net)
    net(x())
    assert runs() == 0
    assert type(net) is nn.Linear
    gemmsmith.unpatch(net)  # again: nothing


def test_everything_until_unpatch(engine: Engine, runs: Runs) -> None:
    gemmsmith.patch()
    x() @ x().t()
    assert runs() == 1
    gemmsmith.unpatch()
    x() @ x().t()
    assert runs() == 0


def test_one_may_end_before_what_began_later(engine: Engine, runs: Runs) -> None:
    first, second = layer(), layer()
    gemmsmith.patch(first)
    gemmsmith.patch(second)
    gemmsmith.unpatch(first)
    first(x())
    assert runs() == 0
    second(x())
    assert runs() == 1
    gemmsmith.patch(second)  # twice: one call ends both
    gemmsmith.unpatch(second)
    assert type(second) is nn.Linear


def test_the_binding_is_left_to_what_is_still_open(
    engine: Engine, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.kind = "cpu"
    sizes: list[object] = []
    dispatch = Dispatch.of("cpu", stream=lambda index: 77)
    assert dispatch is not None
    wide, narrow = (nn.Linear(16, n, bias=False, dtype=BF16) for n in (24, 8))
    gemmsmith.patch(wide)
    gemmsmith.patch(narrow)
    sizes.append(dispatch._blocks[0].only)
    gemmsmith.unpatch(wide)
    sizes.append(dispatch._blocks[0].only)
    gemmsmith.unpatch(narrow)
    sizes.append(dispatch._blocks[0].only)
    assert sizes == [{(24, 16), (8, 16)}, {(8, 16)}, set()]


def test_blocks_end_by_themselves_and_not_by_unpatch(engine: Engine, runs: Runs) -> None:
    net = layer()
    with gemmsmith.patch(net):
        gemmsmith.unpatch(net)
        net(x())
        assert runs() == 1
    assert type(net) is nn.Linear
    gemmsmith.patch(net)
    with pytest.raises(KeyError), gemmsmith.patch(net):
        raise KeyError
    assert is_patched(net)
    net(x())
    assert runs() == 1


def test_a_failure_to_begin_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: nn.Module) -> list[object]:
        raise KeyError

    net = layer()
    monkeypatch.setattr(patching.layers, "recognized", fails)
    with pytest.raises(KeyError):
        gemmsmith.patch(net)
    assert type(net) is nn.Linear
    assert patching._Patches.open == []


def test_a_model_that_is_forgotten_is_not_kept(engine: Engine) -> None:
    net = nn.Sequential(layer())
    gemmsmith.patch(net)
    del net
    gc.collect()
    other = layer()
    gemmsmith.patch(other)
    (left,) = patching._Patches.open
    assert left._model is other


@pytest.mark.parametrize("which", ["model", "everywhere"])
def test_nothing_in_use_is_said_once(which: str) -> None:
    net = layer()
    expected = net(x())
    with pytest.warns(UserWarning, match=r"call gemmsmith\.use|Call gemmsmith\.use") as told:
        gemmsmith.patch(net if which == "model" else None)
    assert [one.filename for one in told] == [__file__]
    gemmsmith.patch(net)
    assert torch.equal(net(x()), expected)


def test_a_warning_that_is_an_error_leaves_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            gemmsmith.patch(layer())
    assert patching._Patches.open == []


def test_captures_need_nothing_in_use() -> None:
    net = layer()
    with gemmsmith.capture() as shapes, gemmsmith.patch(net):
        net(x())
    assert [one.dtype for one in shapes.problems] == ["bf16.then_bias"]


def test_the_report_of_a_call(engine: Engine) -> None:
    file = io.StringIO()
    net = layer()
    gemmsmith.patch(net, report=True, file=file)
    net(x())
    assert file.getvalue() == ""
    gemmsmith.unpatch(net)
    assert file.getvalue().startswith("gemmsmith: 1 of 1 products ran tuned kernels")
    assert engine.watcher is None


def test_a_report_that_is_never_asked_for_comes_at_the_end() -> None:
    script = (
        "import gemmsmith, torch; gemmsmith.patch(report=True); torch.ones(2, 2) @ torch.ones(2, 2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "call gemmsmith.use(...) first" in done.stderr
