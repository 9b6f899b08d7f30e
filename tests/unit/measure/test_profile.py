"""Naming what cuBLAS runs: in order, and without ever being an error. The profiler is played."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch.autograd.profiler import profile as cpu_profile
from torch.profiler import ProfilerActivity

from tuner.measure import profile as module
from tuner.measure.profile import MAX_NAMES, kernels_run, names_in

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
REDUCTION = "void cublasLt::splitKreduce_kernel<32, 16, int>(int)"


def event(name: str, start: float, device: str = "CUDA") -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=start),
    )


TRACE = [
    event("cudaLaunchKernelExC", 1.0, "CPU"),
    event(REDUCTION, 9.0),
    event("Memset (Device)", 3.0),
    event(PRODUCT, 4.0),
]


class Stream:
    def torch(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Trace:
    def __init__(self, events: Sequence[Any] | None) -> None:
        self.function_events = events

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Baseline:
    def __init__(self, error: Exception | None = None) -> None:
        self.launched: list[int] = []
        self._error = error

    def launch(self, i: int) -> None:
        if self._error is not None:
            raise self._error
        self.launched.append(i)


Profiled = Callable[..., tuple[str, ...]]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Profiled:
    def run(events: Sequence[Any] | None, baseline: Baseline | None = None) -> tuple[str, ...]:
        done = SimpleNamespace(record=lambda _: None, wait=lambda: None)
        monkeypatch.setattr(module, "supported_activities", lambda: {ProfilerActivity.CUDA})
        monkeypatch.setattr(
            module, "profile", create_autospec(module.profile, return_value=Trace(events))
        )
        monkeypatch.setattr(module, "Event", lambda: done)
        return kernels_run(baseline or Baseline(), Stream())  # type: ignore[arg-type]

    return run


def test_what_ran_on_the_gpu_is_named_in_order(profiled: Profiled) -> None:
    baseline = Baseline()
    assert profiled(TRACE, baseline) == ("Memset (Device)", PRODUCT, REDUCTION)
    assert baseline.launched == [0]


def test_many_launches_are_told_by_the_first() -> None:
    assert names_in([event(str(i), float(i)) for i in range(100)]) == tuple(
        str(i) for i in range(MAX_NAMES)
    )


@pytest.mark.parametrize("events", [None, [], TRACE[:1]])
def test_a_profiler_that_sees_nothing_is_warned_of(
    profiled: Profiled, events: Sequence[Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert profiled(events) == ()
    assert "CUPTI" in caplog.text


def test_a_profiler_that_fails_is_warned_of(
    profiled: Profiled, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert profiled(TRACE, Baseline(RuntimeError("no permission"))) == ()
    assert "no permission" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch can trace CUDA kernels")
def test_a_torch_without_cuda_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kernels_run(Baseline(), Stream()) == ()  # type: ignore[arg-type]
    assert "cannot trace CUDA kernels" in caplog.text


def test_profiling_does_not_import_torchs_compiler() -> None:
    """A process that profiles is waited for before anything is compiled."""
    code = (
        "import sys, torch; from tuner.measure.profile import profile\n"
        "with profile(use_kineto=True, acc_events=True) as trace: torch.ones(2) + 1\n"
        "assert trace.function_events and 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_torchs_own_events_have_what_is_read_of_them() -> None:
    with cpu_profile() as trace:
        torch.ones(2, 2) @ torch.ones(2, 2)
    events = trace.function_events
    assert events
    assert names_in(events) == ()  # nothing of it ran on a GPU
    assert all(event.time_range.start >= 0 for event in events)
