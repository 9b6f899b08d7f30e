"""The engine with the host in the GPU's place: kernels in C run on CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gemmsmith.ops.engine import Engine, install
from tests.gpu.support.choosing import Ground
from tests.support import stand_in
from tests.support.stand_in import Chooser, Host, Packs


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20261121)


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("pack"))


@pytest.fixture
def runs(pack: Path) -> Callable[[], int]:
    """How many kernels ran since this was last called."""
    counter = ctypes.CDLL(str(pack)).runs_so_far
    counter.restype = ctypes.c_int64
    before = counter()

    def since() -> int:
        nonlocal before
        now = int(counter())
        count, before = now - before, now
        return count

    return since


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def chooser() -> Chooser:
    return Chooser()


@pytest.fixture
def engine(chooser: Chooser, pack: Path, host: Host) -> Iterator[Engine]:
    made = Engine(chooser, Packs(pack), platform=host)
    before = install(made)
    yield made
    install(before)
    torch._dynamo.reset()


@pytest.fixture
def ground(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """The host as a place to train, for the tests that GPUs run too."""
    monkeypatch.setattr("gemmsmith.ops.source.Engine", stand_in.ENGINE)
    return stand_in.ground(pack, tmp_path / "store")
