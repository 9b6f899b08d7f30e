"""Triton kernels: for which tensors they run, and what runs where they cannot be launched.

Without Triton: a module that stands for it compiles what it is told to.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from gemmsmith.errors import LaunchFailed
from gemmsmith.ops.engine.by_triton import _imported, by_triton, is_final

NAME = "kernels_of_a_test"


class Other(torch.Tensor):
    """Another library's."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A module whose function gives what it was called with; all tensors are a GPU's."""
    made = SimpleNamespace(total=lambda *given: given)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    yield made
    _imported.cache_clear()


@by_triton(NAME)
def total(x: torch.Tensor, other: torch.Tensor | None = None) -> Any:
    return x.sum() if other is None else x.sum() + other.sum()


def test_a_kernel_runs_for_a_gpus_tensors(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3)
    assert total(x, None) == (x, None)
    assert total(x.requires_grad_(False), torch.nn.Parameter(x).detach())[0] is x
    with torch.no_grad():
        assert isinstance(total(x, torch.nn.Parameter(x)), tuple)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert float(total(x)) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_is_derived_or_looked_at_is_torchs(kernels: SimpleNamespace) -> None:
    x = torch.ones(3)
    assert total(x.requires_grad_()).requires_grad
    assert total(torch.ones(3), x).requires_grad
    x = x.detach()
    assert float(total(x.as_subclass(Other))) == 3
    assert float(total(torch._neg_view(x))) == -3
    assert float(total(x, x.to_sparse())) == 6
    assert isinstance(torch.compile(total, fullgraph=True, backend="eager")(x), torch.Tensor)
    assert torch.func.vmap(total)(torch.ones(2, 3)).tolist() == [3, 3]
    with FlopCounterMode(display=False):
        assert float(total(x)) == 3
    with forward_ad.dual_level():
        assert float(total(x)) == 3
        dual = total(forward_ad.make_dual(x, torch.ones(3)))
        assert float(forward_ad.unpack_dual(dual).tangent) == 3
    assert is_final(x, None, (3, x))
    assert not is_final(x, (3, torch.ones(3).requires_grad_()))
    assert total(x) == (x,)


def test_what_is_not_launched_is_torchs(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(x: torch.Tensor) -> None:
        raise LaunchFailed("not now")

    kernels.total = refuse
    assert float(total(torch.ones(3))) == 3


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    @by_triton("no_such_module_anywhere")
    def count(x: torch.Tensor) -> int:
        return x.numel()

    assert count(torch.ones(3)) == 3


class Compiler:
    """In the place of `triton.jit`'s result: fails to compile for some constants."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.fails: Callable[[int], bool] = lambda constant: False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: torch.Tensor, constant: int, *, num_warps: int) -> None:
            self.tried.append(constant)
            if self.fails(constant):
                raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

        return launch


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, on another Triton than it launches again by itself."""
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    triton: Any = ModuleType("triton")
    triton.__version__, triton.knobs = "99.0", SimpleNamespace(runtime=hooks)
    compiler: Any = ModuleType("triton.compiler")
    compiler.CompiledKernel = type("CompiledKernel", (), {})
    runtime: Any = ModuleType("triton.runtime")
    runtime.driver = None
    for one in (triton, compiler, runtime):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    name = "gemmsmith.ops.engine.launching"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_what_does_not_compile_is_said_once_and_not_tried_again(
    launching: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler()
    compiler.fails = lambda constant: constant > 1
    kernel = launching.TritonKernel(compiler)
    x = torch.ones(3)
    with caplog.at_level(logging.WARNING, "gemmsmith"):
        kernel(4, (x,), 1)
        for constant in (2, 2, 3):
            with pytest.raises(LaunchFailed):
                kernel(4, (x,), constant)
        kernel(4, (x,), 1)
    assert compiler.tried == [1, 2, 3, 1]
    (said,) = caplog.messages
    assert said == (
        "torch's own operators run instead of Triton's kernel kernel: Failed to find C compiler."
    )


def test_a_fault_of_what_ran_before_is_raised(launching: ModuleType) -> None:
    compiler = Compiler()
    kernel = launching.TritonKernel(compiler)
    kernel(4, (torch.ones(3),), 1)
    compiler.fails = lambda constant: True
    with pytest.raises(RuntimeError, match="C compiler"):
        kernel(4, (torch.ones(3),), 1)


def test_nothing_is_compiled_while_a_graph_is_captured(
    launching: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler()
    kernel = launching.TritonKernel(compiler)
    kernel(4, (torch.ones(3),), 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel(4, (torch.ones(3),), 1)
    with pytest.raises(LaunchFailed):
        kernel(4, (torch.ones(3),), 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel(4, (torch.ones(3),), 2)
    assert compiler.tried == [1, 1, 2]
