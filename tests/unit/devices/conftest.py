"""Candidates by name, and a CudaDevice whose child is fake_child.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemmsmith.core.candidate import Candidate
from gemmsmith.core.kernel import Cutlass3xKernel, EpilogueSchedule, MainloopSchedule, TileScheduler
from gemmsmith.core.launch import Launch
from gemmsmith.core.problem import DType, Layout, Problem
from tuner.devices.base import Contender
from tuner.devices.cuda import CudaDevice

from .fake_child import MODEL

FAKE = Path(__file__).with_name("fake_child.py")
PROBLEM = Problem(m=128, n=128, k=128)


def candidate(name: str, tile_m: int = 64, **launch: object) -> Candidate:
    kernel = Cutlass3xKernel(
        name=name,
        arch="sm90",
        dtype=DType.BF16,
        layout=Layout.TN,
        alignment_a=8,
        alignment_b=8,
        alignment_d=8,
        tile=(tile_m, 128, 64),
        cluster=(1, 1),
        stages=0,
        mainloop=MainloopSchedule.PINGPONG,
        epilogue=EpilogueSchedule.TMA,
        scheduler=TileScheduler.PERSISTENT,
    )
    return Candidate(kernel=kernel, launch=Launch(**launch))


def contenders(*names: str) -> list[Contender]:
    return [
        Contender(candidate=candidate(name, 64 * (i + 1)), pack=Path("pack.so"))
        for i, name in enumerate(names)
    ]


DeviceFactory = Callable[..., CudaDevice]


@pytest.fixture
def fake_device(tmp_path: Path) -> Iterator[DeviceFactory]:
    opened: list[CudaDevice] = []

    def make(setup_timeout_s: float = 30.0) -> CudaDevice:
        device = CudaDevice(
            command=(sys.executable, str(FAKE)),
            model=MODEL,
            uuid="GPU-fake",
            locks=tmp_path,
            setup_timeout_s=setup_timeout_s,
        )
        opened.append(device)
        return device

    yield make
    for device in opened:
        device.close()
